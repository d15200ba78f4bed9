"""What kind of call a torch function is, as far as deferred tensors are concerned."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch


class Kind(Enum):
    """How a call on deferred tensors is answered."""

    BACKWARD = "differentiates"
    READ = "needs the data"
    REFUSED = "refused"
    SAME = "returns its argument"
    ITERATE = "iterates over dimension 0"
    LIKE = "needs only shape, dtype and device"
    INPLACE = "changes its first argument"
    DROPOUT = "draws a mask"
    OTHER = "recorded, or answered from metadata"


_READS = frozenset(
    """item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __repr__ __format__ __contains__
    __reduce_ex__ __deepcopy__ __dlpack__ data_ptr untyped_storage storage pin_memory share_memory_ is_shared equal allclose
    __reversed__ is_nonzero""".split()
)
_REFUSED = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_LIKE = frozenset(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_tensor""".split()
)
_INPLACE_OPERATORS = {
    "__iadd__": torch.Tensor.add,
    "__isub__": torch.Tensor.sub,
    "__imul__": torch.Tensor.mul,
    "__itruediv__": torch.Tensor.div,
    "__idiv__": torch.Tensor.div,
    "__iand__": torch.Tensor.__and__,
    "__ior__": torch.Tensor.__or__,
    "__ifloordiv__": torch.Tensor.floor_divide,
    "__ipow__": torch.Tensor.pow,
}


def name_of(func: Any) -> str:
    """The function's name; for a property its own name instead of `__get__`."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name} {func.__self__.__name__}"
    return str(name)


def kind_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
    """Classify one call."""
    name = name_of(func)
    if name == "backward":
        return Kind.BACKWARD
    if name in _READS:
        return Kind.READ
    if name in _REFUSED:
        return Kind.REFUSED
    if name in ("requires_grad_", "__set__ requires_grad"):
        return Kind.SAME
    if name == "__iter__":
        return Kind.ITERATE
    if name in _LIKE:
        return Kind.LIKE
    if name == "dropout" and not kwargs.get("inplace"):
        return Kind.DROPOUT
    if is_inplace(func, kwargs):
        return Kind.INPLACE
    return Kind.OTHER


def is_inplace(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call changes its first argument (`add_`, `+=`, `x[i] = y`) or an `out=` argument."""
    name = name_of(func)
    return (
        name in _INPLACE_OPERATORS
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("out") is not None
    )


def out_of_place(func: Any) -> Any:
    """A function that returns what `func` would have left in its first argument."""
    name = name_of(func)
    if name in _INPLACE_OPERATORS:
        return _INPLACE_OPERATORS[name]

    def changed_copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = tensor.clone()
        func(copy, *args, **kwargs)
        return copy

    changed_copy.__name__ = f"copy_then_{name}"
    return changed_copy
