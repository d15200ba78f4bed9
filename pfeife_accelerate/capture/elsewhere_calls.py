"""Torch functions called on stubs of parameters elsewhere: answered from metadata, read, or noted as a change.

Models: any function reads the value from the owner; what changes it in place changes what this rank sees of it, since
the same line runs on the owner for the owner's own copy. Changes of a gradient are counted: a read is answered by the
owner if its script has made as many.
Ignores: writes into a view (`p[0].zero_()`), which stay in the fetched copy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.elsewhere_place import Place, Role, Stub, meta_like
from pfeife_accelerate.capture.script import script_line
from pfeife_accelerate.capture.torch_functions import Kind, mapped
from pfeife_accelerate.compat import disable_torch_function, is_converting_a_module
from pfeife_accelerate.errors import PfeifeError

_PLAIN = (torch.Tensor, nn.Parameter)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_AS_META = _words(
    """is_set_to is_same_size register_hook register_post_accumulate_grad_hook retain_grad requires_grad_
    untyped_storage storage_offset is_shared share_memory_ __dir__ is_tensor _is_view _has_compatible_shallow_copy_type
    """
) | {
    f"__{access}__ {name}"
    for name in _words("requires_grad is_leaf grad_fn retains_grad _base output_nr _backward_hooks grad_dtype names")
    for access in ("get", "set")
}
_SHOWN = {f"__{access}__ {name}" for access in ("get", "set") for name in ("data", "grad")} | {
    f"__get__ {name}" for name in ("device", "is_meta", "is_cuda", "is_cpu")
}
_OVERWRITES = _words(
    "copy_ fill_ zero_ normal_ uniform_ random_ exponential_ bernoulli_ cauchy_ geometric_ log_normal_"
)
# Made twice, these leave what they leave when made once: it does not matter whether the owner has made them already.
_REPEATABLE = _words(
    """clamp_ clamp_min_ clamp_max_ clip_ abs_ relu_ nan_to_num_ masked_fill_ index_fill_ index_copy_ fill_diagonal_
    tril_ triu_ floor_ ceil_ round_ trunc_ sign_ __setitem__"""
)
_CONVERSIONS = _words("to cpu cuda float half bfloat16 double type")
_SAME_GRADIENT = frozenset(("contiguous", "detach", "detach_"))


def answer(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a torch function does that has a stub among its arguments."""
    if len(types) != 1 and not all(kind in _PLAIN or issubclass(kind, Stub) for kind in types):
        return NotImplemented  # a deferred tensor records the call
    if _is_metadata(func):
        with disable_torch_function():
            return func(*args, **kwargs)
    name, kind = known.name_of(func), known.kind_of(func, args, kwargs)
    if name == "get_device":
        return -1 if args[0].device.index is None else args[0].device.index
    if name in _SHOWN:
        access, attribute = name.split()
        return getattr(args[0], attribute) if access == "__get__" else setattr(args[0], attribute, args[1])
    if name == "data_ptr":
        return id(args[0].place)  # tells parameters apart, which is all it is good for here
    if "foreach_" in name and name.endswith("_"):
        return _change_each(func, name, args, kwargs)
    target: Any = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    if isinstance(target, Stub) and _is_change(func, name, kind):
        return _change(func, name, target, args[1:], kwargs)
    match kind:
        case Kind.OUT if _has_value(kwargs["out"]):
            out = kwargs.pop("out")
            return _change(torch.Tensor.copy_, "copy_", out, (func(*args, **kwargs),), {})
        case Kind.LIKE:
            return func(*mapped(args, _empty), **mapped(kwargs, _empty))
        case Kind.SHAPED_LIKE if isinstance(args[1], Stub) and not isinstance(args[0], Stub):
            return known.shaped_like(name, args[0], args[1])
        case Kind.BACKWARD:
            raise _not_differentiable(name)
        case _ if name == "grad":
            raise _not_differentiable(name)
    if _is_gradient(target) and name in _SAME_GRADIENT:
        return target
    is_kept = _is_gradient(target) and name in _CONVERSIONS
    if is_kept and (is_converting_a_module() or _keeps_form(func, target, args[1:], kwargs)):
        return target
    if name in _CONVERSIONS and _has_value(target) and is_converting_a_module():
        return _converted(func, target, args[1:], kwargs)
    if name == "detach" and _has_value(target):
        return target.data if target.place.source.reads_later else target.value()
    return _read(func, args, kwargs)


@functools.cache
def _is_metadata(func: Any) -> bool:
    name = known.name_of(func)
    is_kept = name in _AS_META or known.kind_of(func, (), {}) is Kind.METADATA
    return is_kept and name not in _SHOWN and name != "get_device"


def _has_value(item: Any) -> bool:
    return isinstance(item, Stub) and item.role is not Role.GRADIENT


def _is_gradient(item: Any) -> bool:
    return isinstance(item, Stub) and item.role is Role.GRADIENT


def _is_change(func: Any, name: str, kind: Kind) -> bool:
    return kind is Kind.INPLACE or getattr(func, "__module__", None) == "torch.nn.init"


# ---------------------------------------------------------------------------------------------------- reading


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on values. A gradient that reaches a value of a trainable parameter is the owner's to keep."""
    values: dict[int, torch.Tensor] = {}

    def value(item: Any) -> Any:
        if not isinstance(item, Stub):
            return item
        if id(item) not in values:
            values[id(item)] = _leaf(item) if item.role is Role.PARAMETER else item.value()
        return values[id(item)]

    return func(*mapped(args, value), **mapped(kwargs, value))


def _leaf(parameter: Any) -> torch.Tensor:
    value, place = parameter.value(), parameter.place

    def drop(leaf: torch.Tensor) -> None:
        leaf.grad = None
        place.has_gradient, place.replaced_by = True, "the gradient of a term computed from the parameter itself"

    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and parameter.requires_grad:
        value.requires_grad_().register_post_accumulate_grad_hook(drop)
    return value


def _empty(item: Any) -> Any:
    """For functions that read only shape, dtype and device."""
    if not isinstance(item, Stub):
        return item
    stub: Any = item
    return torch.empty_strided(stub.shape, stub.stride(), dtype=stub.dtype, device=stub.device)


# ---------------------------------------------------------------------------------------------------- changing


def _change(func: Any, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A change in place; returns its target, as torch does."""
    kwargs = {key: value for key, value in kwargs.items() if value is not target}
    place: Place = target.place
    if target.role is Role.GRADIENT:
        place.edits += name != "detach_"
        if name == "zero_":
            place.has_gradient = False
        elif not target.counts_edits:
            place.replaced_by = f"`grad.data.{name}`, {script_line()}"
        return target
    is_init = getattr(func, "__module__", None) == "torch.nn.init"
    if target.requires_grad and torch.is_grad_enabled() and not is_init:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    operands = [item for item in _flat((args, kwargs)) if isinstance(item, torch.Tensor)]
    if any(item.is_meta and not isinstance(item, Stub) for item in operands):
        return target  # in `load_state_dict`: nothing to copy
    with torch.no_grad():
        if any(_is_gradient(item) for item in operands):
            what = f"`{name}` with a gradient that lives there, {script_line()}"
            place.source.edit(place.name, None, what, repeatable=False)
        elif name in _OVERWRITES or is_init:
            value = _empty(target)
            func(value, *args, **kwargs)
            place.source.overwrite(place.name, value)
        else:
            frozen_args, frozen_kwargs = mapped((args, kwargs), _frozen)
            edit, what = _Repeated(func, frozen_args, frozen_kwargs), f"`{name}`, {script_line()}"
            place.source.edit(place.name, edit, what, repeatable=name in _REPEATABLE)
    return target


def _change_each(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A change of a list of tensors: of those that are here at once, of those elsewhere one by one."""
    targets = args[0]
    here = [i for i, t in enumerate(targets) if not isinstance(t, Stub)]

    def pick(item: Any, indices: list[int]) -> Any:
        is_parallel = isinstance(item, list | tuple) and len(item) == len(targets)
        return [item[i] for i in indices] if is_parallel else item

    if here:
        func(*[pick(a, here) for a in args], **{k: pick(v, here) for k, v in kwargs.items()})
    for i, target in enumerate(targets):
        if isinstance(target, Stub):
            single = name.partition("foreach")[2]  # `_foreach_mul_` is `mul_`, element by element
            one = [pick(a, [i])[0] if pick(a, [i]) is not a else a for a in args[1:]]
            method = single.removeprefix("_")
            change = getattr(torch.Tensor, method, func)
            _change(change, method, target, tuple(one), kwargs)
    return targets if isinstance(targets, list) else list(targets)


@dataclass(frozen=True, eq=False)
class _Repeated:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, value: torch.Tensor) -> None:
        self.func(value, *self.args, **self.kwargs)


def _frozen(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def _flat(structure: Any) -> list[Any]:
    found: list[Any] = []
    mapped(structure, found.append)
    return found


def set_data(target: Any, value: torch.Tensor) -> None:
    """What `parameter.data = value` does."""
    place: Place = target.place
    if _has_value(value) and value.place is place:
        _set_form(target, value)
        return
    _set_form(target, value)
    place.source.overwrite(place.name, value.detach().clone())


def _set_form(target: Any, value: torch.Tensor) -> None:
    if target.shape != value.shape or target.dtype != value.dtype:
        form, target.place.gradient = meta_like(value), None
        with torch.no_grad(), disable_torch_function():
            torch.Tensor.data.__set__(target, form)  # type: ignore[attr-defined]


def _keeps_form(func: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a conversion would give the tensor itself."""
    probe = torch.empty(0, dtype=target.dtype, device=target.device)
    return func(probe, *args, **kwargs) is probe


def _converted(func: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `module.half()` puts in the place of a parameter's data: the owner converts its own."""
    form = func(torch.empty(0, dtype=target.dtype, device=target.device), *args, **kwargs)
    data = target.data
    _set_form(data, torch.empty_strided(target.shape, target.stride(), dtype=form.dtype, device="meta"))
    return data


# ---------------------------------------------------------------------------------------------------- refusals


def unreadable(gradient: Stub) -> PfeifeError:
    """The error for whoever wants to know a gradient's value after a change that only its owner knows."""
    place = gradient.place
    return PfeifeError(
        id="PF525",
        what=f"the gradient of {place.name!r}, which lives on rank {place.source.rank_of(place.name)}, is read after "
        f"a change that is known there alone: {place.replaced_by}",
        where=script_line(),
        why="each rank has the gradients of its own stages' parameters",
        hints=("read it before the change", "change it in place: p.grad.mul_(factor)"),
    )


def _not_differentiable(function: str) -> PfeifeError:
    return PfeifeError(
        id="PF526",
        what=f"`{function}` was asked for the gradient with respect to a parameter that lives on another rank",
        where=script_line(),
        why="gradients of parameters are made by the backward of the whole model, each on the parameter's own rank",
        hints=("call accelerator.backward(loss)",),
    )
