"""The mean of one model's gradients over pipelines, and the first one's changed buffers, on one rank.

As DistributedDataParallel does, a stage at a time, from the last: the sum of a stage's gradients starts as soon as no
own stage adds to them any more, while other stages still run their backward. Pipelines may differ in when they start
(in one of them, a script may have read a value early), but never in the order, which follows from the placement alone.
Ignores: when this is wanted; that is the script's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from pfeife_accelerate.session.digests import digests
from pfeife_accelerate.session.placement import Placement

if TYPE_CHECKING:
    from pfeife_accelerate.session.call import Call
    from pfeife_accelerate.session.lifecycle import Session


class ReplicaMeans:
    """See the module's docstring; `finish` ends one backward of the script, and `go_on` may come before it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._expected: tuple[Call, int] | None = None
        self._open: list[tuple[str, ...]] = []
        self._started: list[_Sum] = []
        self.note_placement()

    def note_placement(self) -> None:
        """Parameters and buffers have been placed."""
        self._buffers_were = digests(self._placement.placed_buffers.values())

    def expect(self, call: Call, request: int) -> None:
        """The script is in a backward whose gradients are the mean over pipelines, all from one schedule of this call:
        nothing is to be added to them after that.
        """
        self._expected, self._open, self._started = (call, request), self._by_stage(), []

    def expects(self, call: Call, request: int) -> bool:
        """Whether it is that one."""
        return self._expected == (call, request)

    def go_on(self, session: Session, to_come: Collection[str]) -> None:
        """Own stages that still run read these states alone: start with the others, as far as the order allows."""
        while self._open and not any(name in to_come for name in self._open[0]):
            self._start(session, self._open.pop(0))

    def finish(self, session: Session) -> None:
        """After the backward: `.grad` is the mean."""
        if session.mesh.num_pipelines == 1:
            return
        if self._expected is None:
            self._open = self._by_stage()
        while self._open:
            self._start(session, self._open.pop(0))
        started, self._expected, self._started = self._started, None, []
        group, number = session.mesh.replica_group, session.mesh.num_pipelines
        parameters = [p for p in self._placement.own.values() if p.requires_grad]
        buffers = self._placement.placed_buffers
        changed = (digests(buffers.values()) != self._buffers_were).tolist()  # batch_norm changes them without a mark
        flags = torch.tensor([*(p.grad is not None for p in parameters), *changed], dtype=torch.float32)
        flags = flags.to(session.device)
        dist.all_reduce(flags, group=group)  # a pipeline may not have used what another one has
        counts = flags.tolist()
        used = {id(p): p for p, count in zip(parameters, counts, strict=False) if count > 0}
        under_way = {id(p) for of_stage in started for p in of_stage.parameters}
        started += [_Sum(part, group) for part in _by_dtype([p for i, p in used.items() if i not in under_way])]
        for of_stage in started:
            of_stage.give_mean(number, used)
        moved = [buffer for buffer, count in zip(buffers.values(), counts[len(parameters) :], strict=True) if count > 0]
        for same_dtype in _by_dtype(moved):
            flat = torch.cat([buffer.reshape(-1) for buffer in same_dtype])
            dist.broadcast(flat, group=group, group_src=0)
            for buffer, piece in zip(same_dtype, flat.split([b.numel() for b in same_dtype]), strict=True):
                buffer.copy_(piece.reshape(buffer.shape))
        self._buffers_were = digests(buffers.values())

    def _by_stage(self) -> list[tuple[str, ...]]:
        """Names of own parameters, the last stage first. Those tied to other ranks' are whole later, and come last."""
        stages: dict[int, list[str]] = {}
        for name, parameter in self._placement.placed.items():
            if parameter.requires_grad and name not in self._placement.shared:
                stages.setdefault(min(self._placement.stages_of[name]), []).append(name)
        return [tuple(stages[stage]) for stage in sorted(stages, reverse=True)]

    def _start(self, session: Session, names: Sequence[str]) -> None:
        parameters = [self._placement.placed[name] for name in names]
        self._started += [_Sum(part, session.mesh.replica_group) for part in _by_dtype(parameters)]


class _Sum:
    """Gradients of some parameters of one dtype on their way to becoming a sum over pipelines."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self._flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def give_mean(self, number: int, used: Collection[int]) -> None:
        """Wait, and put the mean into `.grad` of the parameters with these ids: others have no gradient anywhere."""
        self._work.wait()
        self._flat /= number
        pieces = self._flat.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            if id(parameter) not in used:
                continue
            if parameter.grad is None:
                parameter.grad = piece.reshape(parameter.shape).clone()
            else:
                parameter.grad.copy_(piece.reshape(parameter.shape))


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def _by_dtype(tensors: Sequence[_Tensor]) -> list[list[_Tensor]]:
    """For one message per dtype."""
    groups: dict[torch.dtype, list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
