"""One operation, run alone on the device: its times, and what its backward keeps.

Models: forward; the gradients of values; those of parameters, added to what is there, as from the second micro-batch
on. The copies of it that take turns hold more than a core's caches, as the rest of a step would.
Ignores: whether the made-up data are like real ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from pfeife_accelerate.compat import storage_id
from pfeife_accelerate.cost.stopwatch import SLOW_S, Run, seconds
from pfeife_accelerate.ir.costs import MeasurableOp, OperandRole, PreparedOp

__all__ = ["OpTrial", "engine_s"]

_TURNS_BYTES: Final = 16 << 20  # what all copies together hold
_MOST_COPIES: Final = 16
_LEAST_BACKWARD_S: Final = 5e-7


class OpTrial:
    """The trial of one operation on `device`; `repeats` runs at least, `overhead_s` as `engine_s` gives it."""

    def __init__(self, op: MeasurableOp, device: torch.device, *, repeats: int, overhead_s: float) -> None:
        self._op, self._device, self._overhead_s = op, device, overhead_s
        first = op.prepare()
        packed: list[torch.Tensor] = []
        before = _reset_peak(device)
        with op.context(), torch.autograd.graph.saved_tensors_hooks(partial(_pack, packed), _unpack):
            outputs = list(_tensors(first.run()))
        self.workspace_bytes = _peak_over(device, before, outputs)
        self.keeps_read, self.keeps_written, self.kept_other_bytes = _kept(first, outputs, len(op.writes), packed)
        packed.clear()
        self._repeats = max(repeats, 1)
        self.forward_s, self._copies = self._forward(first)
        self.backward_input_s, self.backward_weight_s = self._backward()

    def _forward(self, first: PreparedOp) -> tuple[float, list[_Copy]]:
        """Median seconds of a forward, and the copies with what they made."""
        op = self._op
        with op.context():
            again = op.prepare() if op.is_inplace else first
            warm_s = seconds([Run(again.run)], self._device)
            number = 1 if warm_s > 10 * SLOW_S else _number_of_copies(op, self._repeats)
            copies = [_Copy(op, op.prepare()) for _ in range(number)]
            once_each = warm_s > SLOW_S or op.is_inplace
            runs = [Run(copy.run, copy.fresh) for copy in (copies if once_each else self._in_turns(copies))]
            return seconds(runs, self._device), [copy for copy in copies if copy.outputs]

    def _backward(self) -> tuple[float, float]:
        """Seconds for the gradients of values, and further seconds for those of parameters."""
        copies = self._copies
        if not copies or not copies[0].has_roots:
            return 0.0, 0.0
        for copy in copies:
            copy.make_gradients()
        values, weights = copies[0].values, copies[0].weights
        before = _reset_peak(self._device)
        copies[0].backward(values=True, weights=True)  # loads libraries, makes the engine's threads
        self.workspace_bytes = max(self.workspace_bytes, _peak_over(self._device, before, ()))
        copies[0].clear()
        all_s = self._backward_s(values=True, weights=True)
        if not values or not weights:
            return (all_s, 0.0) if values else (0.0, all_s)
        input_s = min(self._backward_s(values=True, weights=False), all_s)
        return input_s, all_s - input_s

    def _backward_s(self, *, values: bool, weights: bool) -> float:
        """A backward of its own costs more than as one of many: without what an empty one costs."""
        runs = [
            Run(partial(copy.backward, values=values, weights=weights), tuple(copy.gradients), copy.clear)
            for copy in self._in_turns(self._copies)
        ]
        return max(seconds(runs, self._device) - self._overhead_s, _LEAST_BACKWARD_S)

    def _in_turns(self, copies: list[_Copy]) -> list[_Copy]:
        """All of them as often as makes the repeats wanted."""
        return copies * math.ceil(self._repeats / len(copies))


class _Copy:
    """The operation with tensors of its own."""

    def __init__(self, op: MeasurableOp, prepared: PreparedOp) -> None:
        pairs = list(zip(op.reads, prepared.reads, strict=True))
        leaves = [(o, t) for o, t in pairs if t.requires_grad and t.is_leaf]
        self._prepared = prepared
        self.fresh = tuple(t for o, t in pairs if o.role is OperandRole.ACTIVATION)
        self.values = [t for o, t in leaves if o.role is not OperandRole.STATE]
        self.weights = [t for o, t in leaves if o.role is OperandRole.STATE]
        self.gradients: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def run(self) -> None:
        """The forward."""
        self.outputs = list(_tensors(self._prepared.run()))

    @property
    def has_roots(self) -> bool:
        """Whether there is anything to go back from, and to."""
        return any(t.requires_grad for t in self.outputs) and bool(self.values or self.weights)

    def make_gradients(self) -> None:
        """Gradients of the outputs, as later operations give them, and of the weights, as earlier rows left them."""
        self.gradients = [torch.ones_like(t) for t in self.outputs if t.requires_grad]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def backward(self, *, values: bool, weights: bool) -> None:
        """The gradients of the values, of the weights, or of both."""
        roots = [t for t in self.outputs if t.requires_grad]
        wanted = (self.values if values else []) + (self.weights if weights else [])
        torch.autograd.backward(roots, self.gradients, retain_graph=True, inputs=wanted)

    def clear(self) -> None:
        """Without gradients of values: the operations before have read them."""
        for value in self.values:
            value.grad = None


def engine_s(device: torch.device) -> float:
    """Seconds that a backward takes which computes nothing."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    root, gradient = leaf.view(1), torch.ones(1, device=device)
    run = Run(lambda: torch.autograd.grad(root, root, gradient, retain_graph=True))
    return min(seconds([run] * 9, device) for _ in range(2))  # the first ones start the engine


def _number_of_copies(op: MeasurableOp, repeats: int) -> int:
    """So many that they hold `_TURNS_BYTES` together; one that holds more alone leaves no cache as it was anyway."""
    storages = {o.storage: o.storage_bytes for o in (*op.reads, *op.writes)}
    return max(1, min(max(_MOST_COPIES, repeats), _TURNS_BYTES // max(1, sum(storages.values()))))


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and temporary memory
# ---------------------------------------------------------------------------------------------------------------------


def _pack(packed: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    packed.append(tensor.detach())
    return tensor


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _kept(
    prepared: PreparedOp, outputs: Sequence[torch.Tensor], num_writes: int, packed: Sequence[torch.Tensor]
) -> tuple[tuple[bool, ...], tuple[bool, ...], int]:
    """Which operands the backward keeps, and the bytes of other storages that it keeps."""
    kept = {storage_id(t): t.untyped_storage().nbytes() for t in packed}
    reads = tuple(storage_id(t) for t in prepared.reads)
    writes = tuple(storage_id(t) for t in outputs)
    other_bytes = sum(size for storage, size in kept.items() if storage not in {*reads, *writes})
    keeps_written = [storage in kept for storage in writes][:num_writes]
    keeps_written += [False] * (num_writes - len(keeps_written))
    return tuple(storage in kept for storage in reads), tuple(keeps_written), other_bytes


def _reset_peak(device: torch.device) -> int:
    """Bytes allocated now, with the peak starting anew from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak_over(device: torch.device, before: int, outputs: Sequence[torch.Tensor]) -> int:
    if device.type != "cuda":
        return 0
    made = {storage_id(t): t.untyped_storage().nbytes() for t in outputs}
    return max(0, int(torch.cuda.max_memory_allocated(device)) - before - sum(made.values()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
