"""Recording a torch function called on deferred tensors: what it would return, worked out on fake tensors.

Ignores: calls that change a tensor in place (`inplace`) and calls with a meaning of their own (`deferred`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.records import FAKE_MODE, Operation, PipelinedCall, Record, fake_twin, value_of
from pfeife_accelerate.capture.torch_functions import mapped
from pfeife_accelerate.compat import make_wrapper, pytree, storage_id
from pfeife_accelerate.errors import PfeifeError


class Deferred(torch.Tensor):
    """The part of `DeferredTensor` that recording needs."""

    record: Record
    viewed: tuple[Deferred, Record, Operation, int] | None
    """The deferred tensor whose memory this one shares, its record at that time, and how this one was made from it."""
    views: list[ref[Deferred]]

    @classmethod
    def make(cls, record: Record) -> Any:
        """A deferred tensor for a record."""
        tensor: Deferred = make_wrapper(cls, record.fake)
        tensor.record, tensor.viewed, tensor.views = record, None, []
        return tensor


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
    outcome = _outcome(func, args, kwargs)
    leaves, structure = pytree.tree_flatten(outcome.fake)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return outcome.fake
    operation = _operation(func, args, kwargs, calls, outcome.draw)
    made = list(leaves)
    for i, leaf in enumerate(leaves):
        if id(leaf) in outcome.own:
            made[i] = outcome.own[id(leaf)]
        elif isinstance(leaf, torch.Tensor):
            made[i] = _made(operation, i, leaf, outcome.real, operands)
    return pytree.tree_unflatten(made, structure)


def _made(
    operation: Operation, index: int, fake: torch.Tensor, real: list[Any] | None, operands: list[Deferred]
) -> Deferred:
    value = real[index] if real is not None else None
    tensor = type(operands[0]).make(Record(fake=fake, operation=operation, index=index, value=value))
    memory = storage_id(fake)
    for operand in operands:
        if storage_id(operand.record.fake) == memory:
            tensor.viewed = (operand, operand.record, operation, index)
            operand.views = [view for view in operand.views if view() is not None] + [ref(tensor)]
            break
    return tensor


@dataclass(frozen=True)
class _Outcome:
    """What a call would return: fake results, and the real ones where it had to run to know their shapes."""

    fake: Any
    real: list[Any] | None = None
    draw: known.Draw | None = None
    """How its random numbers can be drawn again."""
    own: dict[int, Any] = field(default_factory=dict)
    """Arguments by the identities of their fake twins."""


def _outcome(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
    own: dict[int, Any] = {}

    def twin_of(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        twin = item.record.fake if isinstance(item, Deferred) else fake_twin(item)
        if own.setdefault(id(twin), item) is not item and not isinstance(item, Deferred):
            twin = FAKE_MODE.from_tensor(item, static_shapes=True)  # two real tensors alike: tell their twins apart
            own[id(twin)] = item
        return twin

    operands = [t.record.fake for t in deferred_in((args, kwargs))]
    versions = [fake._version for fake in operands]
    twin_args, twin_kwargs = mapped((args, kwargs), twin_of)
    FAKE_MODE.drew.clear()
    try:
        with FAKE_MODE:
            result = func(*twin_args, **twin_kwargs)
        needs_data = bool(FAKE_MODE.drew & _DRAWS_AS_MANY_AS_THE_DATA_SAY)
    except (RuntimeError, NotImplementedError):  # the result's shape depends on data, or the call itself is wrong
        needs_data = True
    if versions != [fake._version for fake in operands]:
        why = "it changes its argument in place in a way that is not known"
        raise refused(func, why, ("use a form that returns a new tensor",))
    device = operands[0].device
    if needs_data:
        return _real_outcome(func, args, kwargs, device)
    if not FAKE_MODE.drew:
        return _Outcome(result, own=own)
    draw = known.Draw(device)
    with torch.no_grad():  # the generators must go on as if the operation had run
        func(*mapped(args, placeholder), **mapped(kwargs, placeholder))
    return _Outcome(result, draw=draw, own=own)


_DRAWS_AS_MANY_AS_THE_DATA_SAY = frozenset(
    ("rrelu_with_noise", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "multinomial")
)


def _real_outcome(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> _Outcome:
    draw = known.Draw(device)
    with torch.no_grad():
        result = func(*resolved(args), **resolved(kwargs))
    gradient = torch.is_grad_enabled() and any(t.record.fake.requires_grad for t in deferred_in((args, kwargs)))
    twins = mapped(result, lambda x: _twin_of_result(x, gradient) if isinstance(x, torch.Tensor) else x)
    return _Outcome(twins, pytree.tree_leaves(result), draw if draw.drew() else None)


def _twin_of_result(item: torch.Tensor, gradient: bool) -> torch.Tensor:
    with FAKE_MODE, torch.no_grad():
        fake = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
    return fake.requires_grad_(gradient and item.is_floating_point())


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


def script_line() -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "pfeife_accelerate.", "accelerate.")) and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"
