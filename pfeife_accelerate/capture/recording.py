"""Recording a torch function called on deferred tensors: what it would return, worked out on fake tensors.

Ignores: calls that change a tensor in place (`inplace`) and calls with a meaning of their own (`deferred`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.elsewhere import DataElsewhere
from pfeife_accelerate.capture.outcomes import (
    ChangesItsArgument,
    Metadata,
    NeedsData,
    Outcome,
    Result,
    fake_twin,
    new_fake,
    outcome_of,
)
from pfeife_accelerate.capture.readable import Handle
from pfeife_accelerate.capture.records import Operation, PipelinedCall, Record, value_of
from pfeife_accelerate.capture.script import script_line
from pfeife_accelerate.capture.torch_functions import mapped
from pfeife_accelerate.compat import FakeTensor, make_wrapper, pytree
from pfeife_accelerate.errors import PfeifeError


@dataclass(frozen=True)
class ViewStep:
    """An operation whose result `index` is a view; `SOURCE` stands for the viewed tensor among its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    grad_enabled: bool

    @property
    def cuts_gradient(self) -> bool:
        """Whether the view shares values alone: autograd does not know that it is one."""
        return not self.grad_enabled or known.name_of(self.func) in ("detach", "__get__ data")


@dataclass
class Memory:
    """What a tensor and its views share: the value that all are views of, and the tensors that the script still has."""

    record: Record
    members: list[ref[Deferred]]

    def living(self) -> list[Deferred]:
        """The tensors that still exist."""
        return [member for member in (reference() for reference in self.members) if member is not None]


class Deferred(torch.Tensor):
    """The part of `DeferredTensor` that recording needs."""

    handle: Handle
    memory: Memory | None
    """What it shares with its views, or with the tensor it is a view of; None if it has never had one."""
    steps: tuple[ViewStep, ...]
    """How this view is made from the memory's record."""

    @classmethod
    def make(cls, record: Record) -> Any:
        """A deferred tensor for a record."""
        tensor: Deferred = make_wrapper(cls, record.fake)
        tensor.handle, tensor.memory, tensor.steps = Handle(record), None, ()
        return tensor

    @property
    def record(self) -> Record:
        """What it stands for."""
        return self.handle.record

    @record.setter
    def record(self, record: Record) -> None:
        self.handle.record = record


def resolved(structure: Any) -> Any:
    """The structure with every deferred tensor replaced by its value."""
    return mapped(structure, lambda x: value_of(x.record) if isinstance(x, Deferred) else x)


def deferred_in(structure: Any) -> list[Deferred]:
    """All deferred tensors in a structure."""
    found: list[Deferred] = []
    mapped(structure, lambda item: found.append(item) if isinstance(item, Deferred) else None)
    return found


def needs_gradient(tensor: Deferred) -> bool:
    """Whether a gradient may still have to flow through a tensor."""
    return bool(tensor.record.fake.requires_grad and tensor.record.live)


def record_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call that changes nothing; returns deferred tensors, or what is known without computing."""
    operands = deferred_in((args, kwargs))
    calls = tuple({id(call): call for t in operands for call in t.record.calls}.values())
    if not any(call.differentiable for call in calls):
        # Nothing can be differentiated through these any more. Values of several steps are not kept as one expression,
        # which would grow from step to step.
        if len(calls) != 1 or all(t.record.known() is not None for t in operands):
            return func(*resolved(args), **resolved(kwargs))
    elif not all(t.record.live for t in operands):
        args, kwargs = mapped(
            (args, kwargs), lambda x: x if not isinstance(x, Deferred) or x.record.live else value_of(x.record)
        )
        operands = [t for t in operands if t.record.live]
        calls = tuple({id(call): call for t in operands for call in t.record.calls}.values())
    args = known.masks_as_indices(func, args, lambda x: isinstance(x, torch.Tensor) and not isinstance(x, Deferred))
    tensors = _tensors_in((args, kwargs))
    if any(isinstance(t, DataElsewhere) for t in tensors):
        args, kwargs = mapped((args, kwargs), lambda x: x.value() if isinstance(x, DataElsewhere) else x)
        tensors = _tensors_in((args, kwargs))
    outcome, real, draw = _outcome(func, args, kwargs, tensors)
    if not outcome.has_tensors:
        return pytree.tree_unflatten([result.value for result in outcome.results], outcome.structure)
    operation = _operation(func, args, kwargs, calls, draw)
    values = pytree.tree_leaves(real) if real is not None else [None] * len(outcome.results)
    made = [_made(operation, i, result, values[i], tensors) for i, result in enumerate(outcome.results)]
    return pytree.tree_unflatten(made, outcome.structure)


def _outcome(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
) -> tuple[Outcome, Any, known.Draw | None]:
    """What the call returns; its real results if it had to run to tell; how its random numbers can be drawn again."""
    device = next(t.record.fake.device for t in tensors if isinstance(t, Deferred))
    metadata = [_described(t) for t in tensors]
    try:
        outcome = outcome_of(func, args, kwargs, metadata)
    except NeedsData:
        pass
    except ChangesItsArgument:
        why = "it changes its argument in place in a way that is not known"
        raise refused(func, why, ("use a form that returns a new tensor",)) from None
    else:
        return outcome, None, _drawn(func, args, kwargs, device) if outcome.draws else None
    real, draw = _run_for_real(func, args, kwargs, device)
    return _outcome_of_real(real, args, kwargs), real, draw


def _described(tensor: torch.Tensor) -> Metadata | torch.Tensor:
    """What is known of an argument without its data: its metadata, or a fake tensor for one of an unusual kind."""
    if isinstance(tensor, Deferred):
        return tensor.record.metadata or tensor.record.fake
    if isinstance(tensor, FakeTensor):
        raise PfeifeError(
            id="PF523",
            what="a function was given the outputs of a pipelined model both as arguments and by its surroundings",
            where=script_line(),
            why="its arguments are stand-ins while its shape is worked out, and what it takes from outside is not",
            hints=("pass every output of the model to it as an argument",),
        )
    return Metadata.of(tensor) or fake_twin(tensor)


def _made(operation: Operation, index: int, result: Result, value: Any, tensors: list[Any]) -> Any:
    if result.own is not None:
        return tensors[result.own]
    if result.fake is None:
        return result.value
    cls = next(type(t) for t in tensors if isinstance(t, Deferred))
    tensor = cls.make(Record(fake=result.fake, operation=operation, index=index, value=value))
    for call in operation.calls:
        call.note(tensor.record)
    viewed = tensors[result.viewed] if result.viewed is not None else None
    if isinstance(viewed, Deferred):
        args, kwargs = mapped((operation.args, operation.kwargs), lambda x: known.SOURCE if x is viewed.record else x)
        if viewed.memory is None:
            viewed.memory = Memory(record=viewed.record, members=[ref(viewed)])
        tensor.memory = viewed.memory
        tensor.steps = (*viewed.steps, ViewStep(operation.func, args, kwargs, index, operation.grad_enabled))
        tensor.memory.members = [ref(member) for member in tensor.memory.living()] + [ref(tensor)]
    return tensor


def _tensors_in(structure: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(structure, lambda item: found.append(item) if isinstance(item, torch.Tensor) else None)
    return found


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> known.Draw:
    """Let the generators go on as if the call had run; gives how it can draw the same numbers when it does run."""
    draw = known.Draw(device)
    with torch.no_grad():
        func(*mapped(args, placeholder), **mapped(kwargs, placeholder))
    return draw


def _run_for_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """The call's results for the arguments' values, and how it drew random numbers, if it did."""
    draw = known.Draw(device)
    with torch.no_grad():
        result = func(*resolved(args), **resolved(kwargs))
    return result, draw if draw.drew() else None


def _outcome_of_real(real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    gradient = torch.is_grad_enabled() and any(t.record.fake.requires_grad for t in deferred_in((args, kwargs)))

    def result_of(item: Any) -> Result:
        if not isinstance(item, torch.Tensor):
            return Result(value=item)
        differentiable = gradient and (item.is_floating_point() or item.is_complex())
        return Result(
            fake=new_fake(Metadata(tuple(item.shape), item.stride(), item.dtype, item.device, differentiable))
        )

    leaves, structure = pytree.tree_flatten(real)
    return Outcome(tuple(result_of(leaf) for leaf in leaves), structure)


_COPIED_NUMEL = 64


def _operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], calls: tuple[PipelinedCall, ...], draw: Any
) -> Operation:
    device = deferred_in((args, kwargs))[0].record.fake.device.type
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    versions: list[tuple[torch.Tensor, type, int]] = []

    def reference(item: Any) -> Any:
        if isinstance(item, Deferred):
            return item.record
        if not isinstance(item, torch.Tensor) or item.is_inference():
            return item
        if item.numel() <= _COPIED_NUMEL and not item.requires_grad:
            return item.clone()  # the script may change it before the operation runs
        versions.append((item, type(item), item._version))
        return item

    args, kwargs = mapped((args, kwargs), reference)
    return Operation(func, args, kwargs, torch.is_grad_enabled(), autocast, script_line(), calls, tuple(versions), draw)


def placeholder(item: Any) -> Any:
    """A real tensor for functions that read only an argument's shape, dtype and device; 0.5 is a valid probability."""
    if not isinstance(item, Deferred):
        return item
    fake = item.record.fake
    empty = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return empty.fill_(0.5) if fake.is_floating_point() else empty.zero_()


def refused(func: Any, why: str, hints: tuple[str, ...]) -> PfeifeError:
    """The error for a call that the output of a pipelined model cannot take."""
    return PfeifeError(
        id="PF501",
        what=f"`{known.name_of(func)}` is not available on the output of a pipelined model before it is computed",
        where=script_line(),
        why=why,
        hints=hints,
    )
