"""Automatic pipeline parallelism for HuggingFace Accelerate.

The script stays as it is, its configuration gets one more section:

    $ cat pfeife.yaml
    distributed_type: MULTI_CPU
    num_processes: 2
    pfeife_config: {pipeline_size: 2}
    $ accelerate launch --config pfeife.yaml train.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pfeife_accelerate import _autoload

if TYPE_CHECKING:
    from pfeife_accelerate.config import PfeifePlugin
    from pfeife_accelerate.errors import PfeifeError

__all__ = ["PfeifeError", "PfeifePlugin", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load public names on first use: this module is imported at the end of every `import torch`."""
    if name == "PfeifePlugin":
        from pfeife_accelerate.config import PfeifePlugin

        return PfeifePlugin
    if name == "PfeifeError":
        from pfeife_accelerate.errors import PfeifeError

        return PfeifeError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The entry point does the same; this is for TORCH_DEVICE_BACKEND_AUTOLOAD=0.
_autoload.autoload()
