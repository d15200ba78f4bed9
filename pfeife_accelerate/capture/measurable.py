"""A captured graph's operations at concrete sizes, each ready to be run alone on made-up tensors.

Models: shapes, strides, element types, constants, gradient flags, autocast as it is where the operation stands, inputs
that are one and the same tensor. Ignores: the values (floats are random, integers zero, booleans true), and that two
inputs may be views of one storage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from pfeife_accelerate.capture.fused_accumulation import accumulating_linear
from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind
from pfeife_accelerate.capture.nodes import autocast_step, inputs_of, mutates, target_name, tensors_in
from pfeife_accelerate.capture.regions import region_of
from pfeife_accelerate.capture.weight_gradients import adds_in_product, weights_of
from pfeife_accelerate.compat import FakeTensor, storage_id, under_transforms
from pfeife_accelerate.ir import TensorSpec
from pfeife_accelerate.ir.costs import MeasurableOp, Operand, OperandRole, PreparedOp

__all__ = ["NotMeasurable", "make_up", "measurable_ops"]

_RANDOM_TILE = 1 << 20  # elements drawn; a larger tensor repeats them, since drawing is slower than most operations


class NotMeasurable(Exception):
    """An operation cannot be run alone."""


@dataclass(frozen=True, kw_only=True)
class _Autocast:
    """Autocast where an operation stands. Casts are not cached: each operation pays for its own, as it does once."""

    device_type: str
    dtype: torch.dtype | None = None
    enabled: bool = False

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True, kw_only=True)
class _MadeUp:
    """A tensor to make: what it looks like, and whether as a leaf that wants a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    role: OperandRole

    @property
    def text(self) -> str:
        stride = "" if self.stride == _dense(self.shape, self.stride) else f"{{{','.join(map(str, self.stride))}}}"
        flags = f"{'g' if self.requires_grad else ''}{'s' if self.role is OperandRole.STATE else ''}"
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]{stride}{flags}"

    def make(self, device: torch.device) -> torch.Tensor:
        numel = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = _flat(0 if 0 in self.shape else numel, self.dtype, device)
        return flat.as_strided(self.shape, self.stride).requires_grad_(self.requires_grad)


@dataclass(frozen=True, kw_only=True)
class _NotMade:
    """A tensor that cannot be made up: one that exists under `torch.vmap` or its kin alone."""

    text: str


def _can_be_made(tensor: torch.Tensor) -> bool:
    return under_transforms(tensor) is tensor


def measurable_ops(
    graph: CapturedGraph,
    bindings: Mapping[Any, int],
    device: torch.device,
    autocast: tuple[str, torch.dtype] | None = None,
) -> tuple[MeasurableOp | None, ...]:
    """The operations of `graph.ops` for one micro-batch; None for one that costs nothing.

    One that reads or makes what cannot be made up raises NotMeasurable when it is prepared: it is to be modelled.
    `bindings` are the micro-batch's sizes by symbol. `autocast` is (device type, element type) of the region in which
    the model is called; regions inside the graph are followed by themselves.
    """
    outside = _Autocast(device_type=device.type)
    if autocast is not None:
        outside = _Autocast(device_type=autocast[0], dtype=autocast[1], enabled=True)
    regions = [outside]
    found: list[MeasurableOp | None] = []
    for node in graph.ops:
        step = autocast_step(node)
        if step > 0:
            regions.append(_entered(node))
        elif step < 0 and len(regions) > 1:
            regions.pop()
        found.append(_Reader(graph, bindings, device).read(node, regions[-1]) if _computes(node) else None)
    return tuple(found)


def make_up(graph: CapturedGraph, example: Any, bindings: Mapping[Any, int], device: torch.device) -> Any:
    """A made-up value like `example`, an example value of `graph`, for sizes with these numbers.

    Raises: NotMeasurable where it exists under `torch.vmap` or its kin alone.
    """
    return _made(_Reader(graph, bindings, device).described(example, OperandRole.ACTIVATION), device)


def _entered(node: fx.Node) -> _Autocast:
    device_type, dtype, enabled = (*node.args, None, None, True)[:3]
    return _Autocast(
        device_type=str(device_type),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
        enabled=enabled is not False,
    )


def _computes(node: fx.Node) -> bool:
    """Whether the operation makes or changes tensors; picking one out of a tuple does not."""
    if mutates(node) is not None:
        return True
    if not any(True for _ in tensors_in(node.meta.get("example_value"))):
        return False
    picks = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
    return not picks or isinstance(node.args[0].meta.get("example_value"), torch.Tensor)  # type: ignore[union-attr]


class _Reader:
    """Reads one operation: its arguments with sizes put in and every tensor described once."""

    def __init__(self, graph: CapturedGraph, bindings: Mapping[Any, int], device: torch.device) -> None:
        self.graph = graph
        self.bindings = bindings
        self.device = device
        self.values: dict[fx.Node, Any] = {}  # numbers, tensors of the graph module, or _MadeUp in their structure

    def read(self, node: fx.Node, autocast: _Autocast) -> MeasurableOp:
        reads: list[Operand] = []
        for read in inputs_of(node):
            self.values[read] = self._value(read)
            reads += self._operands(read)
        changed = mutates(node)
        example = node.meta.get("example_value")
        outputs = list(tensors_in(example)) or list(tensors_in(changed.meta.get("example_value") if changed else None))
        needs_grad = any(tensor.requires_grad for tensor in outputs)
        target = accumulating_linear if adds_in_product(self.graph, node) else node.target
        text = f"{_target_text(target)}({self._text(node.args)};{self._text(node.kwargs)})"
        mode = f"{autocast.device_type}:{autocast.dtype}" if autocast.enabled else "no"
        return MeasurableOp(
            key=f"{text} grad={needs_grad} autocast={mode}",
            target=target_name(node),
            reads=tuple(reads),
            writes=tuple(self._operand(tensor, OperandRole.ACTIVATION) for tensor in outputs),
            prepare=partial(_prepare, node, target, self.values, changed, self.device)
            if all(map(_can_be_made, outputs))
            else _refuse_to_prepare,
            context=partial(_mode, autocast, needs_grad),
            is_inplace=changed is not None,
            region=region.number if (region := region_of(node)) is not None else None,
            puts_off=bool(weights_of(self.graph, node)),
        )

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.graph.gm)
            if not isinstance(value, FakeTensor):
                return value
            return self.described(value, OperandRole.STATE)
        return self.described(node.meta.get("example_value"), self._role(node))

    def described(self, example: Any, role: OperandRole) -> Any:
        """A tensor as what is to be made, a number as itself, in the structure they are in."""
        if isinstance(example, torch.Tensor) and not _can_be_made(example):
            shape = self.graph.concrete(tuple(under_transforms(example).shape), self.bindings)
            return _NotMade(text=f"{example.dtype}{shape} mapped")
        if isinstance(example, torch.Tensor):
            return _MadeUp(
                shape=self.graph.concrete(tuple(example.shape), self.bindings),
                stride=self.graph.concrete(example.stride(), self.bindings),
                dtype=example.dtype,
                requires_grad=example.requires_grad,
                role=role,
            )
        if isinstance(example, tuple | list) and not isinstance(example, torch.Size):
            return tuple(self.described(item, role) for item in example)
        return self.graph.concrete(example, self.bindings)

    def _role(self, node: fx.Node) -> OperandRole:
        if node.op == "get_attr":
            return OperandRole.STATE
        placeholder = self.graph.placeholder_of.get(node)
        if placeholder is None:
            return OperandRole.ACTIVATION
        return OperandRole.STATE if placeholder.kind is PlaceholderKind.STATE else OperandRole.INPUT

    def _operands(self, node: fx.Node) -> Iterator[Operand]:
        example = self.values[node] if node.op == "get_attr" else node.meta.get("example_value")
        if isinstance(example, _MadeUp):
            example = operator.attrgetter(str(node.target))(self.graph.gm)
        for tensor in tensors_in(example):
            yield self._operand(tensor, self._role(node))

    def _operand(self, tensor: torch.Tensor, role: OperandRole) -> Operand:
        behind = under_transforms(tensor)
        spec = TensorSpec(
            shape=self.graph.concrete(tuple(behind.shape), self.bindings),
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )
        storage_bytes = self.graph.concrete(behind.untyped_storage().nbytes(), self.bindings)
        return Operand(spec=spec, storage=storage_id(tensor), storage_bytes=storage_bytes, role=role)

    def _text(self, value: Any) -> str:
        """Canonical text of an argument: equal texts, equal work."""
        if isinstance(value, fx.Node):
            return f"%{list(self.values).index(value)}:{self._text(self.values[value])}"
        if isinstance(value, _MadeUp | _NotMade):
            return value.text
        if isinstance(value, torch.Tensor):
            return self._text(self.described(value, OperandRole.STATE))
        if isinstance(value, tuple | list):
            return f"({','.join(map(self._text, value))})"
        if isinstance(value, Mapping):
            return ",".join(f"{name}={self._text(item)}" for name, item in sorted(value.items()))
        if isinstance(value, slice):
            return f"{self._text(value.start)}:{self._text(value.stop)}:{self._text(value.step)}"
        if isinstance(value, torch.device):
            return value.type
        return value.code if isinstance(value, fx.GraphModule) else repr(value)


def _target_text(target: Any) -> str:
    """The operation's name, the same in every process; a function made by a factory is named by what it encloses."""
    if isinstance(target, str):
        return f".{target}"
    name = getattr(target, "__qualname__", None) or str(target)
    enclosed = [getattr(cell.cell_contents, "__name__", "") for cell in getattr(target, "__closure__", None) or ()]
    return f"{getattr(target, '__module__', None) or ''}.{name}{sorted(filter(None, enclosed)) or ''}"


# ---------------------------------------------------------------------------------------------------------------------
# Made-up tensors
# ---------------------------------------------------------------------------------------------------------------------


def _refuse_to_prepare() -> PreparedOp:
    raise NotMeasurable("its results exist under torch.vmap or its kin alone")


def _prepare(
    node: fx.Node, target: Any, values: Mapping[fx.Node, Any], changed: fx.Node | None, device: torch.device
) -> PreparedOp:
    real = {read: _made(value, device) for read, value in values.items()}
    given = dict(real)
    if changed is not None:  # a leaf that wants a gradient must not be changed in place
        with torch.enable_grad():
            given[changed] = real[changed].clone()
    args = map_arg(node.args, given.__getitem__)
    kwargs = map_arg(node.kwargs, given.__getitem__)
    reads = tuple(tensor for value in real.values() for tensor in tensors_in(value))
    return PreparedOp(run=_call(target, args, kwargs), reads=reads)


def _call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    if isinstance(target, str):
        return partial(getattr(args[0], target), *args[1:], **kwargs)
    if target is operator.setitem:
        return partial(_set_item, *args)
    return partial(target, *args, **kwargs)


def _set_item(changed: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    changed[index] = value
    return changed


def _made(value: Any, device: torch.device) -> Any:
    if isinstance(value, _MadeUp):
        return value.make(device)
    if isinstance(value, _NotMade):
        raise NotMeasurable(f"it reads what exists under torch.vmap or its kin alone: {value.text}")
    if isinstance(value, tuple):
        return tuple(_made(item, device) for item in value)
    return value


@contextmanager
def _mode(autocast: _Autocast, needs_grad: bool) -> Iterator[None]:
    with torch.set_grad_enabled(needs_grad), autocast.context():
        yield


def _flat(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        drawn = dtype if dtype.is_complex or dtype.itemsize > 1 else torch.float32
        tile = torch.randn(min(numel, _RANDOM_TILE), dtype=drawn, device=device).to(dtype)
        return tile if numel <= _RANDOM_TILE else tile.repeat(-(-numel // _RANDOM_TILE))[:numel]
    return torch.full((numel,), dtype is torch.bool, dtype=dtype, device=device)


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor; a dimension of size 1 keeps the stride it has, which does not matter."""
    found, step = [], 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        found.append(own if size == 1 else step)
        step *= max(size, 1)
    return tuple(reversed(found))
