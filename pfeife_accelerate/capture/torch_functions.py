"""What kind of call a torch function is to a deferred tensor, and functional forms of calls that change a tensor.

Knows torch's functions by name. Does not know deferred tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any, ClassVar

import torch

from pfeife_accelerate.compat import pytree


class Kind(Enum):
    """How a call on deferred tensors is answered."""

    METADATA = "answered from shape, dtype and device"
    BACKWARD = "differentiates"
    READ = "needs the data"
    REFUSED = "refused"
    REQUIRES_GRAD = "asks for a gradient"
    GRAPH = "a property of the autograd graph"
    ITERATE = "iterates over dimension 0"
    LIKE = "needs only its first argument's shape, dtype and device"
    SHAPED_LIKE = "needs only its second argument's shape, dtype and device"
    INPLACE = "changes its first argument"
    OUT = "writes into a given tensor"
    MASKED = "takes the entries where a mask is true"
    DROPOUT = "draws a mask"
    STATISTICS = "updates running statistics"
    OTHER = "recorded"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METADATA = _words(
    """size dim ndimension numel nelement stride element_size is_floating_point is_complex is_signed get_device
    is_contiguous __len__ __hash__ is_conj is_neg is_inference has_names"""
) | {
    f"__get__ {name}"
    for name in _words(
        """shape dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized
        is_nested is_mkldnn is_mps is_xpu is_xla is_hpu is_ipu is_vulkan is_maia is_mtia itemsize nbytes names _version
        name volatile"""
    )
}
_READS = _words(
    """item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __repr__ __format__ __contains__
    __reduce_ex__ __deepcopy__ __dlpack__ data_ptr storage_offset untyped_storage storage is_shared equal allclose
    is_nonzero"""
)
_GRAPH = _words("is_leaf grad_fn grad retains_grad _base output_nr grad_dtype")
_HOOKS = _words("register_hook register_post_accumulate_grad_hook retain_grad")
_METADATA_CHANGES = _words(
    """resize_ resize_as_ set_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ rename_ share_memory_
    sparse_resize_ sparse_resize_and_clear_"""
)
_LIKE = _words(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_tensor new_empty_strided"""
)
_INPLACE_OPERATORS = _words(
    """__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __iand__ __ior__ __ixor__ __ifloordiv__ __imod__ __ipow__
    __ilshift__ __irshift__ __setitem__"""
)


@functools.cache
def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name} {func.__self__.__name__}"
    return str(name)


def name_of(func: Any) -> str:
    """The function's name; for a property its own name after `__get__`."""
    return _name_of(func)


_FUNCTIONALS = (torch.nn.functional.dropout, torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)


def kind_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
    """Classify one call."""
    if kwargs.get("out") is not None:
        return Kind.OUT
    kind = _kind_of_name(name_of(func))
    if kind in (Kind.DROPOUT, Kind.STATISTICS) and func not in _FUNCTIONALS:
        return Kind.OTHER
    if kind is Kind.OTHER and asks_inplace(func, args, kwargs):
        return Kind.INPLACE
    return kind


@functools.cache
def _kind_of_name(name: str) -> Kind:
    for kind, names in _KINDS.items():
        if name in names:
            return kind
    if name.startswith(("__set__ ", "__delete__ ")):
        return Kind.REFUSED
    if name.endswith("_") and not name.endswith("__"):
        return Kind.INPLACE
    return Kind.OTHER


_KINDS: dict[Kind, frozenset[str]] = {
    Kind.METADATA: _METADATA,
    Kind.BACKWARD: frozenset({"backward"}),
    Kind.READ: _READS,
    Kind.REFUSED: _HOOKS | _METADATA_CHANGES | {"grad"},
    Kind.REQUIRES_GRAD: frozenset({"requires_grad_", "__set__ requires_grad"}),
    Kind.GRAPH: frozenset(f"__get__ {name}" for name in _GRAPH),
    Kind.ITERATE: frozenset({"__iter__"}),
    Kind.LIKE: _LIKE,
    Kind.SHAPED_LIKE: frozenset({"view_as", "expand_as", "reshape_as", "type_as"}),
    Kind.MASKED: frozenset({"masked_select"}),
    Kind.DROPOUT: frozenset({"dropout"}),
    Kind.STATISTICS: frozenset({"batch_norm", "instance_norm"}),
    Kind.INPLACE: _INPLACE_OPERATORS,
}


def why_refused(name: str) -> tuple[str, tuple[str, ...]]:
    """Reason and hints for a refused call."""
    if name in _METADATA_CHANGES:
        return "a deferred tensor's shape is fixed", (f"use the form that returns a new tensor: {name.rstrip('_')}",)
    if name == "grad":
        return "the stages' graphs live on other ranks and are freed micro-batch by micro-batch", (
            "call loss.backward()",
        )
    if name in _HOOKS:
        hints = ("call it on a value made under torch.no_grad()", "or after accelerator.backward")
        return "the output has no autograd graph on this rank that a hook could be attached to", hints
    return "the attribute belongs to a tensor that exists on another rank", ("make a new tensor instead",)


class PipelineBackward:
    """What a deferred tensor shows as its `grad_fn`."""

    next_functions = ()
    metadata: ClassVar[dict[str, Any]] = {}

    def name(self) -> str:
        """As autograd's nodes have one."""
        return "PipelineBackward"


def graph_attribute(name: str, requires_grad: bool) -> Any:
    """What a deferred tensor says of its place in the autograd graph: that of a value computed from parameters."""
    match name.removeprefix("__get__ "):
        case "is_leaf":
            return not requires_grad
        case "grad_fn":
            return PipelineBackward() if requires_grad else None
        case "retains_grad":
            return False
        case "output_nr":
            return 0
        case _:
            return None


def shaped_like(name: str, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor.view_as(other)` and its kin, from the other's metadata."""
    match name:
        case "view_as":
            return tensor.view(other.shape)
        case "expand_as":
            return tensor.expand(other.shape)
        case "reshape_as":
            return tensor.reshape(other.shape)
        case _:
            return tensor.to(device=other.device, dtype=other.dtype)


# ---------------------------------------------------------------------------------------------------- calls that change


@functools.cache
def _inplace_position(func: Any) -> int | None:
    """Position of a functional's `inplace` parameter (`F.relu(x, inplace=True)`)."""
    if not str(getattr(func, "__module__", "")).startswith("torch.nn.functional"):
        return None
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def asks_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `inplace=True` was passed to a functional, by name or by position."""
    position = _inplace_position(func)
    if position is None:
        return bool(kwargs.get("inplace", False))
    return bool(args[position] if len(args) > position else kwargs.get("inplace", False))


def _not_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position = _inplace_position(func)
    if position is not None and len(args) > position:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "inplace": False}


def out_of_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keep_gradient: bool) -> tuple[Any, Any, Any]:
    """Function, arguments and keyword arguments that return what a changing call would have left in its first argument.

    `keep_gradient`: the change is made under `no_grad` to a value with a gradient, which goes on flowing.
    """
    if asks_inplace(func, args, kwargs) and not keep_gradient:
        return func, *_not_inplace(func, args, kwargs)
    return ChangedCopy(func, keep_gradient), args, kwargs


class ChangedCopy:
    """A changing function, made to change a copy and return it."""

    def __init__(self, func: Any, keep_gradient: bool) -> None:
        self._func = func
        self._keep_gradient = keep_gradient
        self.__module__ = str(getattr(func, "__module__", ""))
        self.__name__ = f"copy_then_{name_of(func)}" + ("_without_gradient" if keep_gradient else "")
        self.__qualname__ = self.__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChangedCopy) and (self._func, self.__name__) == (other._func, other.__name__)

    def __hash__(self) -> int:
        return hash((self._func, self.__name__))

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The changed copy."""
        copy = tensor.clone()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._keep_gradient):
            self._func(copy, *args, **kwargs)
        return copy


class WrittenBack:
    """A tensor after one of its views was changed: a copy of it with the view's new value in the view's place.

    `steps` are the functions that lead from the tensor to the view: which of their results, whether with a gradient.
    """

    def __init__(self, steps: tuple[tuple[Any, int, bool], ...], keep_gradient: bool) -> None:
        self._steps = steps
        self._keep_gradient = keep_gradient
        self.__module__ = str(getattr(steps[-1][0], "__module__", ""))
        names = "_".join(f"{name_of(func)}_{index}_{grad_enabled}" for func, index, grad_enabled in steps)
        self.__name__ = f"written_back_{names}" + ("_without_gradient" if keep_gradient else "")
        self.__qualname__ = self.__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrittenBack) and (self._steps, self.__name__) == (other._steps, other.__name__)

    def __hash__(self) -> int:
        return hash((self._steps, self.__name__))

    def __call__(self, source: torch.Tensor, changed: torch.Tensor, arguments: list[tuple[Any, Any]]) -> torch.Tensor:
        """`arguments` are those of the steps, with `SOURCE` for the tensor that each looks at."""
        view = copy = source.clone()
        for (func, index, grad_enabled), given in zip(self._steps, arguments, strict=True):
            args, kwargs = mapped(given, lambda item, view=view: view if item is SOURCE else item)  # type: ignore[misc]
            with torch.set_grad_enabled(torch.is_grad_enabled() and grad_enabled):
                view = pytree.tree_leaves(func(*args, **kwargs))[index]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._keep_gradient):
            view.copy_(changed)
        return copy


class Source(Enum):
    """Stands for the viewed tensor among the arguments of the function that made the view."""

    SOURCE = "source"


SOURCE = Source.SOURCE

# ---------------------------------------------------------------------------------------------------- arguments

_PLAIN_TYPES = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.Tensor,
    torch.nn.Parameter,
    type(...),
)


def mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    """The structure with the function applied to everything in its tuples, lists, dicts, slices and containers."""
    kind = type(structure)
    if kind is tuple:
        return tuple([function(i) if type(i) in _PLAIN_TYPES else mapped(i, function) for i in structure])
    if kind is list:
        return [mapped(i, function) for i in structure]
    if kind is dict:
        return {key: mapped(value, function) for key, value in structure.items()}
    if kind is slice:
        return slice(
            mapped(structure.start, function), mapped(structure.stop, function), mapped(structure.step, function)
        )
    if kind in _PLAIN_TYPES or isinstance(structure, torch.Tensor):
        return function(structure)
    return pytree.tree_map(function, structure)


_TELLING = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(...), type(None), Enum)


def telling(item: Any, unknown: Callable[[Any], Hashable], tensor: Callable[[Any], Hashable]) -> Hashable:
    """A value that is equal for equal arguments, and for them alone: `1`, `1.0` and `True` are three things.

    `unknown` is asked for what cannot be told apart, `tensor` for tensors.
    """
    kind = type(item)
    if kind is tuple or kind is list:
        return kind.__name__, *[telling(i, unknown, tensor) for i in item]
    if kind is dict:
        return "dict", *[(key, telling(value, unknown, tensor)) for key, value in item.items()]
    if kind is slice:
        return "slice", *[telling(i, unknown, tensor) for i in (item.start, item.stop, item.step)]
    if isinstance(item, torch.Tensor):
        return tensor(item)
    if kind in (int, float, bool, str, complex) or isinstance(item, _TELLING):
        return kind.__name__, repr(item)
    return unknown(item)


def masks_as_indices(func: Any, args: tuple[Any, ...], is_real: Callable[[Any], bool]) -> tuple[Any, ...]:
    """`x[mask]` with a real mask has a known shape once the mask is written as indices."""
    if name_of(func) not in ("__getitem__", "__setitem__") or len(args) < 2:
        return args
    parts: Sequence[Any] = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(is_real(part) and part.dtype in (torch.bool, torch.uint8) for part in parts):
        return args
    indices: list[Any] = []
    for part in parts:
        if is_real(part) and part.dtype in (torch.bool, torch.uint8) and part.dim() > 0:
            indices += part.nonzero(as_tuple=True)
        else:
            indices.append(part)
    return args[0], tuple(indices), *args[2:]


# ---------------------------------------------------------------------------------------------------- random numbers


class Draw:
    """The state of the generators before an operation that draws random numbers, so that it can be repeated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._own = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None

    def drew(self) -> bool:
        """Whether numbers have been drawn since."""
        if not torch.equal(self._cpu, torch.get_rng_state()):
            return True
        now = torch.get_device_module(self._device).get_rng_state(self._device) if self._own is not None else None
        return now is not None and not torch.equal(now, self._own)

    def repeat(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the numbers that it drew first; the generators stay as they are now."""
        devices = [] if self._own is None else [self._device]
        with torch.random.fork_rng(devices=devices, device_type=self._device.type if devices else "cuda"):
            torch.set_rng_state(self._cpu)
            if self._own is not None:
                torch.get_device_module(self._device).set_rng_state(self._own, self._device)
            return func(*args, **kwargs)
