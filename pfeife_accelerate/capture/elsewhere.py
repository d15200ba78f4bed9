"""A parameter whose data lives on another rank of the pipeline, as the script sees it; its data, and its gradient.

Models: any torch function on such a parameter reads its value from the owner; what changes it in place changes what
this rank sees of it, since the same line runs on the owner for the owner's own copy. Edits of its gradient are accepted
and done by the owner alone; the gradient's value cannot be read here.
Ignores: how values are fetched and how long local changes last (`Source`); writes into a view (`p[0].zero_()`), which
stay in the fetched copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.script import script_line
from pfeife_accelerate.capture.torch_functions import Kind, mapped
from pfeife_accelerate.compat import disable_torch_function
from pfeife_accelerate.errors import PfeifeError

Edit = Callable[[torch.Tensor], Any]


class Source(Protocol):
    """Whoever can give the values of a model's parameters elsewhere."""

    device: torch.device
    """Where values are given, and where the owner's data would be if it were here."""

    @property
    def hides_gradients(self) -> bool:
        """Whether nobody is to see a gradient now: an optimizer skips parameters that have none."""

    @property
    def reads_later(self) -> bool:
        """Whether `detach()` need not fetch, because what it returns will be replaced (a state dict being made)."""

    def value(self, name: str) -> torch.Tensor:
        """A copy of the value as this rank's script should see it."""

    def overwrite(self, name: str, value: torch.Tensor) -> None:
        """From here on, until the model runs or an optimizer steps, this is the value on this rank."""

    def edit(self, name: str, edit: Edit | None, what: str, *, repeatable: bool) -> None:
        """The same for a change of whatever the value is; None: a change that only the owner can make.

        `repeatable`: made twice, it leaves what it leaves when made once.
        """

    def rank_of(self, name: str) -> int:
        """The rank of the launch that owns the parameter."""


@dataclass(eq=False)
class Place:
    """Which parameter elsewhere a tensor stands for, and whether it has a gradient."""

    name: str
    source: Source
    has_gradient: bool = False
    _gradient: GradientElsewhere | None = None

    def gradient(self, parameter: torch.Tensor) -> GradientElsewhere | None:
        """What `parameter.grad` is now."""
        if not self.has_gradient or self.source.hides_gradients:
            return None
        if self._gradient is None or self._gradient.dtype is not parameter.dtype:
            self._gradient = _meta_like(parameter).as_subclass(GradientElsewhere)
            self._gradient.place = self
        return self._gradient


class ParameterElsewhere(nn.Parameter):
    """The parameter itself: the script's object, without memory."""

    place: Place

    @classmethod
    def of(cls, parameter: nn.Parameter, place: Place) -> ParameterElsewhere:
        """A twin to put in the place of a parameter that is given up; it keeps what the script hung on it."""
        twin: ParameterElsewhere = cls(_meta_like(parameter), requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        twin.place = place
        return twin

    def value(self) -> torch.Tensor:
        """The value now, a copy without history."""
        return self.place.source.value(self.place.name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from metadata, read, or change."""
        return _dispatch(func, types, tuple(args), dict(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the data would be: what a script makes for the parameter must have data."""
        return self.place.source.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """There is no data here."""
        return True

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """As `device` says."""
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """As `device` says."""
        return self.device.type == "cpu"

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The data, to be read or written later."""
        return _data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """None, or a placeholder."""
        return self.place.gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.place.has_gradient = value is not None

    @grad.deleter
    def grad(self) -> None:
        self.place.has_gradient = False

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.value(), requires_grad=self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.value(), requires_grad=self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.value(), requires_grad=self.requires_grad).__reduce_ex__(protocol)


class DataElsewhere(torch.Tensor):
    """A parameter's `.data`: reads fetch when they happen, writes reach the parameter."""

    place: Place

    def value(self) -> torch.Tensor:
        """The value now, a copy."""
        return self.place.source.value(self.place.name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from metadata, read, or change."""
        return _dispatch(func, types, tuple(args), dict(kwargs or {}))

    device, is_meta = ParameterElsewhere.device, ParameterElsewhere.is_meta
    is_cuda, is_cpu = ParameterElsewhere.is_cuda, ParameterElsewhere.is_cpu

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Itself."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.value())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)


class GradientElsewhere(torch.Tensor):
    """The gradient of a parameter elsewhere: can be edited, which does nothing, and not read."""

    place: Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from metadata, or refuse."""
        return _dispatch(func, types, tuple(args), dict(kwargs or {}))

    device, is_meta = ParameterElsewhere.device, ParameterElsewhere.is_meta
    is_cuda, is_cpu = ParameterElsewhere.is_cuda, ParameterElsewhere.is_cpu

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Itself: edits of it do nothing either."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        pass  # an edit, which the owner makes

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of {self.place.name!r}, on rank {self.place.source.rank_of(self.place.name)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _unreadable("copy.deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _unreadable("pickle", self)


_OURS = (ParameterElsewhere, DataElsewhere, GradientElsewhere)
_VALUES = (ParameterElsewhere, DataElsewhere)


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
_MOVES = _words("to cpu cuda float half bfloat16 double type contiguous detach")


def _dispatch(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not all(issubclass(kind, _OURS) for kind in types):
        return NotImplemented  # a deferred tensor records the call
    name, kind = known.name_of(func), known.kind_of(func, args, kwargs)
    if (kind is Kind.METADATA and name not in _SHOWN) or name in _AS_META:
        if name == "get_device":
            return -1 if args[0].device.index is None else args[0].device.index
        with disable_torch_function():
            return func(*args, **kwargs)
    if name in _SHOWN:
        access, attribute = name.split()
        return getattr(args[0], attribute) if access == "__get__" else setattr(args[0], attribute, args[1])
    if name == "data_ptr":
        return id(args[0].place)  # tells parameters apart, which is all it is good for here
    if "foreach_" in name and name.endswith("_"):
        return _change_each(func, name, args, kwargs)
    target = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    if isinstance(target, _OURS) and _is_change(func, name, kind):
        return _change(func, name, target, args[1:], kwargs)
    match kind:
        case Kind.OUT if isinstance(kwargs["out"], _VALUES):
            out = kwargs.pop("out")
            return _change(torch.Tensor.copy_, "copy_", out, (func(*args, **kwargs),), {})
        case Kind.LIKE:
            return func(*mapped(args, _empty), **mapped(kwargs, _empty))
        case Kind.SHAPED_LIKE if isinstance(args[1], _OURS) and not isinstance(args[0], _OURS):
            return known.shaped_like(name, args[0], args[1])
        case Kind.BACKWARD:
            raise _not_differentiable(name)
        case _ if name == "grad":
            raise _not_differentiable(name)
    if isinstance(target, GradientElsewhere) and name in _MOVES:
        return target
    if name == "detach" and isinstance(target, _VALUES):
        return _data_of(target) if target.place.source.reads_later else target.value()
    return _read(func, args, kwargs)


def _is_change(func: Any, name: str, kind: Kind) -> bool:
    return kind is Kind.INPLACE or getattr(func, "__module__", None) == "torch.nn.init"


# ---------------------------------------------------------------------------------------------------- reading


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on values. A gradient that reaches a value of a trainable parameter is the owner's to keep."""
    values: dict[int, torch.Tensor] = {}

    def value(item: Any) -> Any:
        if isinstance(item, GradientElsewhere):
            raise _unreadable(known.name_of(func), item)
        if not isinstance(item, _VALUES):
            return item
        if id(item) not in values:
            values[id(item)] = item.value() if isinstance(item, DataElsewhere) else _leaf(item)
        return values[id(item)]

    return func(*mapped(args, value), **mapped(kwargs, value))


def _leaf(parameter: ParameterElsewhere) -> torch.Tensor:
    value, place = parameter.value(), parameter.place

    def drop(leaf: torch.Tensor) -> None:
        leaf.grad = None
        place.has_gradient = True

    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and parameter.requires_grad:
        value.requires_grad_().register_post_accumulate_grad_hook(drop)
    return value


def _empty(item: Any) -> Any:
    """For functions that read only shape, dtype and device."""
    if not isinstance(item, _OURS):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _data_of(tensor: torch.Tensor) -> DataElsewhere:
    data = _meta_like(tensor).as_subclass(DataElsewhere)
    data.place = tensor.place  # type: ignore[attr-defined]
    return data


# ---------------------------------------------------------------------------------------------------- changing


def _change(func: Any, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A change in place; returns its target, as torch does."""
    kwargs = {key: value for key, value in kwargs.items() if value is not target}
    place: Place = target.place
    if isinstance(target, GradientElsewhere):
        if name == "zero_":
            place.has_gradient = False
        return target
    if isinstance(target, ParameterElsewhere) and torch.is_grad_enabled() and target.requires_grad:
        if getattr(func, "__module__", None) != "torch.nn.init":
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    operands = [item for item in _flat((args, kwargs)) if isinstance(item, torch.Tensor)]
    with torch.no_grad():
        if any(isinstance(item, GradientElsewhere) for item in operands):
            what = f"`{name}` with a gradient that lives there, {script_line()}"
            place.source.edit(place.name, None, what, repeatable=False)
        elif name in _OVERWRITES or getattr(func, "__module__", None) == "torch.nn.init":
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
    here = [i for i, t in enumerate(targets) if not isinstance(t, _OURS)]

    def pick(item: Any, indices: list[int]) -> Any:
        is_parallel = isinstance(item, list | tuple) and len(item) == len(targets)
        return [item[i] for i in indices] if is_parallel else item

    if here:
        func(*[pick(a, here) for a in args], **{k: pick(v, here) for k, v in kwargs.items()})
    for i, target in enumerate(targets):
        if isinstance(target, _OURS):
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


def _set_data(target: Any, value: torch.Tensor) -> None:
    place: Place = target.place
    if isinstance(value, _VALUES) and value.place is place:
        return
    with torch.no_grad(), disable_torch_function():
        if target.shape != value.shape or target.dtype != value.dtype:
            torch.Tensor.data.__set__(target, _meta_like(value))  # type: ignore[attr-defined]
    place.source.overwrite(place.name, value.detach().clone())


# ---------------------------------------------------------------------------------------------------- refusals


def _unreadable(function: str, gradient: GradientElsewhere) -> PfeifeError:
    place = gradient.place
    rank = place.source.rank_of(place.name)
    return PfeifeError(
        id="PF525",
        what=f"`{function}` reads the gradient of {place.name!r}, which lives on rank {rank}",
        where=script_line(),
        why="each rank has the gradients of its own stages' parameters; it may change the others' in place, not read",
        hints=(
            'accelerator.clip_grad_norm_(model.parameters(), float("inf")) gives the norm over the whole model',
            "look at p.grad where not p.is_meta, and add up over the ranks",
        ),
    )


def _not_differentiable(function: str) -> PfeifeError:
    return PfeifeError(
        id="PF526",
        what=f"`{function}` was asked for the gradient with respect to a parameter that lives on another rank",
        where=script_line(),
        why="gradients of parameters are made by the backward of the whole model, each on the parameter's own rank",
        hints=("call accelerator.backward(loss)",),
    )
