"""Moved to `compat`."""

from pfeife_accelerate import compat as _compat

globals().update({k: v for k, v in vars(_compat).items() if not k.startswith("__")})

from typing import Any  # noqa: E402

from torch.autograd.function import BackwardCFunction  # noqa: E402, F401  # what a custom Function leaves as `grad_fn`
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402, F401  # documented in the dispatcher's notes only


def schema_of(operator: _compat.OpOverload) -> Any:
    """An ATen operator's schema: names, defaults and aliasing of its arguments (torch 1.12 to 2.14)."""
    return operator._schema
