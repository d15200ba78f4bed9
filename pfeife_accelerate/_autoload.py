"""What `import torch` runs in every process where the package is installed: arm import hooks, nothing else.

Models: patches that are applied the moment a module of accelerate has finished importing, in any import order.
Ignores: what the patches do; `integration/seams.py` lists them.

An exception here would break `import torch` for everybody, so nothing leaves `autoload`, and only the standard
library is imported before one of the awaited modules is really used.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["autoload", "when_imported"]

# `accelerate.accelerator` may be half loaded when torch calls us; `accelerate.launchers` is imported after it, by
# accelerate's own __init__, in every import order, and before the command line's own code runs.
_LIBRARY = "accelerate.launchers"

# transformers asks these two for the process number.
_TRAINER = ("transformers.training_args", "transformers.trainer")


def autoload() -> None:
    """Arm the hooks; safe to call any number of times. Target of the entry point in group `torch.backends`."""
    try:
        when_imported(_LIBRARY, _install_seams)
        for module in _TRAINER:
            when_imported(module, partial(_install_optional_seams, module))
        if _section_present():
            _install_torch_seams()
    except Exception as error:
        if _section_present():
            warnings.warn(f"pfeife_accelerate could not be loaded and does nothing: {error!r}", stacklevel=2)


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` once `module` has been executed: at once if it is loaded, else at its import."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        callback()
        return
    _finder().wait_for(module, callback)


def _section_present() -> bool:
    names = [name for name in os.environ if name.startswith("PFEIFE_")]
    enabled = os.environ.get("PFEIFE_ENABLED", "true").strip().lower()
    return bool(names) and enabled not in ("0", "false", "no", "off")


def _install_optional_seams(module: str) -> None:
    if _section_present():
        from pfeife_accelerate.integration import seams

        seams.install_for(module)


def _install_torch_seams() -> None:
    from pfeife_accelerate.integration import seams

    seams.install(seams.SeamGroup.TORCH)


def _install_seams() -> None:
    from pfeife_accelerate.integration import seams

    is_active = _section_present()
    try:
        seams.install(seams.SeamGroup.LAUNCH)
        seams.install(seams.SeamGroup.ALWAYS)
        if is_active:
            seams.install_active()
    except Exception as error:
        if is_active:
            raise
        # The person did not ask for us in this process: accelerate must work as if we were not there.
        warnings.warn(f"pfeife_accelerate is not in force: {error}", stacklevel=2)


class _NotifyingLoader(Loader):
    """The module's own loader, plus a call once the module has been executed."""

    def __init__(self, inner: Loader, notify: Callable[[], None]) -> None:
        self._inner = inner
        self._notify = notify

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave creation to the module's own loader."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute, with the module showing its own loader as if we had never been there, then notify."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._notify()


class _PostImportFinder(MetaPathFinder):
    """Finds nothing itself: wraps the loader that the other finders give for an awaited module."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def wait_for(self, module: str, callback: Callable[[], None]) -> None:
        """Add a callback; the same one is not added twice."""
        with self._lock:
            callbacks = self._waiting.setdefault(module, [])
            if callback not in callbacks:
                callbacks.append(callback)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of the import protocol."""
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _NotifyingLoader(spec.loader, lambda: self._notify(fullname))
                return spec
        return None

    def _notify(self, module: str) -> None:
        with self._lock:
            callbacks = self._waiting.pop(module, [])
        for callback in callbacks:
            callback()


def _finder() -> _PostImportFinder:
    for finder in sys.meta_path:
        if isinstance(finder, _PostImportFinder):
            return finder
    ours = _PostImportFinder()
    sys.meta_path.insert(0, ours)
    return ours
