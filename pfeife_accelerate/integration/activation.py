"""`Accelerator(pfeife_plugin=...)`: the one seam that is in also when no pipeline is configured.

Models: a keyword that Accelerate does not know, taken out before Accelerate sees it.
Ignores: everything when it is absent; the call goes through as it came.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pfeife_accelerate.config import PfeifePlugin, export, is_enabled, overlay
from pfeife_accelerate.errors import PfeifeError

__all__ = ["accelerator_init"]


def accelerator_init(
    original: Callable[..., None],
    accelerator: Any,
    *args: Any,
    pfeife_plugin: PfeifePlugin | None = None,
    **kwargs: Any,
) -> None:
    """Hook of `Accelerator.__init__`."""
    if pfeife_plugin is not None:
        activate(pfeife_plugin)
    original(accelerator, *args, **kwargs)


def activate(plugin: PfeifePlugin) -> None:
    """Make `plugin` the options of this process, over those of the environment, and put the seams in."""
    if not isinstance(plugin, PfeifePlugin):
        raise PfeifeError(
            id="PF102",
            what=f"pfeife_plugin must be a PfeifePlugin, got {type(plugin).__name__}",
            where="Accelerator(pfeife_plugin=...)",
            hints=("from pfeife_accelerate import PfeifePlugin",),
        )
    # Light until here: this module is loaded in scripts that do not use us.
    from pfeife_accelerate.integration import process_view, seams

    lower = PfeifePlugin.from_environment() if is_enabled() else PfeifePlugin()
    export(overlay(plugin, lower))
    seams.install_active()
    for module in seams.OPTIONAL_MODULES:
        if module in sys.modules:
            seams.install_for(module)
    process_view.enter_if_made()
