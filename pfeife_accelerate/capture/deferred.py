"""Deferred tensors: what a pipelined model returns in training, and the recording of what the script does with them.

A `DeferredTensor` has the class hierarchy, shape, dtype, device and `requires_grad` of the real tensor, but no data. It is
either a *leaf* (a value that some stage of the pipeline will compute) or the result of a recorded operation. Operations are
recorded at the level of torch functions. Asking for data (`item`, `print`, a branch) resolves the value through the
`Resolver` that made the leaf; an operation that cannot be recorded resolves its arguments and runs on real tensors.

Does not model: views of deferred tensors that are later changed in place through another name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.compat import FakeTensorMode, disable_torch_function, make_wrapper
from pfeife_accelerate.errors import PfeifeError


class PipelinedCall(Protocol):
    """One call of a pipelined model, as far as its deferred outputs need to know."""

    @property
    def differentiable(self) -> bool:
        """Whether `backward` through this call is still possible."""


class Resolver(Protocol):
    """Whoever can compute deferred values: the engine of a pipelined model."""

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        """The leaf's whole-batch value, on this rank."""

    def backward(self, loss: DeferredTensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
        """Differentiate a deferred scalar."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A value computed by the pipeline in one call of the model.

    `batch_dim` is the dimension that carries the batch (None: the same for every micro-batch), `rows_per_item` how many
    entries of that dimension belong to one item of the batch.
    """

    resolver: Resolver
    call: PipelinedCall
    value: str
    batch_dim: int | None
    rows_per_item: int


@dataclass(frozen=True, eq=False)
class Operation:
    """A recorded torch function. `args` and `kwargs` may contain deferred and real tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_enabled: bool
    autocast: tuple[str, torch.dtype] | None
    where: str

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Run on other arguments, in the recorded gradient and autocast modes; returns the flattened results."""
        mode = torch.autocast(*self.autocast) if self.autocast else torch.autocast("cpu", enabled=False)
        with torch.set_grad_enabled(self.grad_enabled and torch.is_grad_enabled()), mode:
            return pytree.tree_leaves(self.func(*args, **kwargs))


@dataclass(eq=False)
class Record:
    """What a deferred tensor stands for: a leaf, or output `index` of an operation; and its value once known."""

    fake: torch.Tensor
    leaf: Leaf | None = None
    operation: Operation | None = None
    index: int = 0
    value: torch.Tensor | None = None
    promise: Callable[[], torch.Tensor] | None = field(default=None)
    """Gives the value without computing: set when the schedule that computes it has been run."""

    def known(self) -> torch.Tensor | None:
        """The value if it costs no schedule to get."""
        if self.value is None and self.promise is not None:
            self.value, self.promise = self.promise(), None
        return self.value


FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True)


class DeferredTensor(torch.Tensor):
    """A tensor whose value the pipeline has not computed yet; see the module's docstring."""

    record: Record

    @staticmethod
    def make(record: Record) -> DeferredTensor:
        """A deferred tensor for a record."""
        tensor: DeferredTensor = make_wrapper(DeferredTensor, record.fake)
        tensor.record = record
        return tensor

    @staticmethod
    def leaf(leaf: Leaf, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, grad: bool) -> DeferredTensor:
        """A deferred tensor for a value of the pipeline."""
        with FAKE_MODE, torch.no_grad():
            fake = torch.empty(shape, dtype=dtype, device=device)
        return DeferredTensor.make(Record(fake=fake.requires_grad_(grad), leaf=leaf))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record, answer from metadata, or resolve."""
        return _dispatch(func, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached only by code below torch functions (collectives, autograd of foreign code): needs real data."""
        return func(*_resolved(args), **_resolved(kwargs or {}))


def is_deferred(value: Any) -> bool:
    """Whether a value is a deferred tensor."""
    return isinstance(value, DeferredTensor)


def resolve(tensor: DeferredTensor) -> torch.Tensor:
    """The real value of a deferred tensor; runs whatever part of the pipeline's schedule it needs."""
    record = tensor.record
    value = record.known()
    if value is not None:
        return value
    if record.leaf is not None:
        value = record.leaf.resolver.resolve_leaf(record.leaf)
    else:
        assert record.operation is not None
        operation = record.operation
        with torch.no_grad():
            value = operation.run(_resolved(operation.args), _resolved(operation.kwargs))[record.index]
    known_now = record.known()  # resolving an argument may have run the step that delivers this very value
    record.value = value if known_now is None else known_now
    return record.value


def resolve_tree(structure: Any) -> Any:
    """The structure with every deferred tensor replaced by its value."""
    return _resolved(structure)


def _resolved(structure: Any) -> Any:
    return pytree.tree_map(lambda x: resolve(x) if isinstance(x, DeferredTensor) else x, structure)


def _deferred_in(structure: Any) -> Iterator[DeferredTensor]:
    for item in pytree.tree_leaves(structure):
        if isinstance(item, DeferredTensor):
            yield item


def _fakes(structure: Any) -> Any:
    def fake(item: Any) -> Any:
        if isinstance(item, DeferredTensor):
            return item.record.fake
        return FAKE_MODE.from_tensor(item, static_shapes=True) if isinstance(item, torch.Tensor) else item

    return pytree.tree_map(fake, structure)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    match known.kind_of(func, args, kwargs):
        case known.Kind.BACKWARD:
            return _backward(*args, **kwargs)
        case known.Kind.READ:
            return func(*_resolved(args), **_resolved(kwargs))
        case known.Kind.REFUSED:
            raise PfeifeError(
                id="PF501",
                what=f"`{known.name_of(func)}` is not available on the output of a pipelined model before it is computed",
                where=_script_line(),
                why="the output has no autograd graph on this rank that a hook could be attached to",
                hints=("call it on a value made under torch.no_grad()", "or after accelerator.backward"),
            )
        case known.Kind.SAME:
            return args[0]
        case known.Kind.ITERATE:
            return iter(torch.unbind(args[0], 0))
        case known.Kind.LIKE:
            return func(*_placeholders(args), **kwargs)
        case known.Kind.INPLACE:
            return _inplace(func, args, kwargs)
        case known.Kind.DROPOUT:
            return _dropout(*args, **kwargs)
        case known.Kind.OTHER:
            return _record(func, args, kwargs)


def _backward(
    loss: DeferredTensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if create_graph or inputs is not None:
        raise PfeifeError(
            id="PF502",
            what="backward(create_graph=True) and backward(inputs=...) are not supported on a pipelined model",
            where=_script_line(),
            why="the stages' graphs live on other ranks and are freed micro-batch by micro-batch",
            hints=("drop the argument",),
        )
    for item in _leaves_of(loss):
        return item.resolver.backward(loss, gradient, bool(retain_graph))
    raise PfeifeError(id="PF503", what="the loss does not depend on any pipelined model", where=_script_line())


def _leaves_of(tensor: DeferredTensor) -> Iterator[Leaf]:
    pending, seen = [tensor.record], set()
    while pending:
        record = pending.pop()
        if id(record) in seen:
            continue
        seen.add(id(record))
        if record.leaf is not None:
            yield record.leaf
        elif record.operation is not None:
            pending += [t.record for t in _deferred_in((record.operation.args, record.operation.kwargs))]


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if all(_is_plain(t) for t in _deferred_in((args, kwargs))):
        return func(*_resolved(args), **_resolved(kwargs))
    args = _without_masks(func, args)
    real: list[Any] | None = None
    try:
        with FAKE_MODE:
            fake = func(*_fakes(args), **_fakes(kwargs))
    except (RuntimeError, NotImplementedError):  # the result's shape depends on data, or the call itself is wrong
        with torch.no_grad():
            result = func(*_resolved(args), **_resolved(kwargs))
        fake, real = _fake_results(result, args, kwargs), pytree.tree_leaves(result)
    leaves, structure = pytree.tree_flatten(fake)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return fake
    operation = _operation(func, args, kwargs)

    def deferred(index: int, leaf: torch.Tensor) -> DeferredTensor:
        value = real[index] if real is not None else None
        return DeferredTensor.make(Record(fake=leaf, operation=operation, index=index, value=value))

    made = [deferred(i, leaf) if isinstance(leaf, torch.Tensor) else leaf for i, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(made, structure)


def _is_plain(tensor: DeferredTensor) -> bool:
    """Whether the tensor is as good as its value: known, and nothing can be differentiated through it any more."""
    record = tensor.record
    if record.known() is None:
        return False
    differentiable = torch.is_grad_enabled() and record.fake.requires_grad
    return not (differentiable and any(leaf.call.differentiable for leaf in _leaves_of(tensor)))


def _without_masks(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`x[mask]` with a real mask has a known shape once the mask is written as indices."""
    if known.name_of(func) != "__getitem__" or len(args) != 2:
        return args
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    indices: list[Any] = []
    for part in parts:
        mask = isinstance(part, torch.Tensor) and not isinstance(part, DeferredTensor) and part.dtype is torch.bool
        indices += part.nonzero(as_tuple=True) if mask else (part,)
    return args[0], tuple(indices) if isinstance(args[1], tuple) or len(indices) > 1 else indices[0]


def _fake_results(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fake twins of real results whose shapes could only be had by computing them."""
    grad = torch.is_grad_enabled() and any(t.record.fake.requires_grad for t in _deferred_in((args, kwargs)))

    def twin(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        fake = FAKE_MODE.from_tensor(item.detach(), static_shapes=True)
        return fake.requires_grad_(grad and item.is_floating_point())

    return pytree.tree_map(twin, result)


def _operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
    device = next(_deferred_in((args, kwargs))).record.fake.device.type
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    return Operation(func, args, kwargs, torch.is_grad_enabled(), autocast, _script_line())


def _inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x += y`: the deferred tensor comes to stand for the result. A real tensor is changed for real, at once."""
    target = args[0]
    if not isinstance(target, DeferredTensor):
        return func(*_resolved(args), **_resolved(kwargs))
    before = DeferredTensor.make(target.record)
    result = _record(known.out_of_place(func), (before, *args[1:]), kwargs)
    if isinstance(result, DeferredTensor):
        target.record = result.record
    else:
        target.record = Record(fake=target.record.fake, value=result)
    return target


def _dropout(input: DeferredTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The mask is drawn now, from the script's generator, so that all ranks draw alike; the product is recorded."""
    if not training or p == 0.0:
        return input
    mask = torch.nn.functional.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p)
    return torch.mul(input, mask)


def _placeholders(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Uninitialised real tensors for functions that read only their argument's shape, dtype and device."""

    def empty(item: Any) -> Any:
        if not isinstance(item, DeferredTensor):
            return item
        with disable_torch_function():
            return torch.empty(item.shape, dtype=item.dtype, device=item.device)

    return tuple(pytree.tree_map(empty, args))


def _script_line() -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "pfeife_accelerate", "accelerate.")) and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"
