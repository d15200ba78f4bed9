"""Gradients between the schedule that computes them and the script that asks for them.

Models: parameters tied across stages (their gradients are summed over the holding ranks), gradients computed before
this rank's script called `backward` (held aside, since the script may still zero its gradients), and the mean over
pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.digests import digests
from pfeife_accelerate.session.placement import Placement

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session


class GradientBook:
    """The own parameters' gradients of one model on one rank."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.note_placement()

    def note_placement(self) -> None:
        """Parameters and buffers have been placed."""
        self._buffers_were = digests(self.placement.placed_buffers.values())

    @contextmanager
    def collecting(self, call: Call, session: Session, request: int, *, may_be_wrong: bool) -> Iterator[None]:
        """Around a schedule with backwards: then `.grad` is whole, or `call.held_gradients` if the script has not
        asked for this backward yet, or if its result may have to be dropped (a guess, a loss on trial).
        """
        own, shared = self.placement.placed, self.placement.shared
        held = may_be_wrong or call.asked <= request
        aside = {name: p.grad for name, p in own.items() if held or name in shared}
        for name in aside:
            own[name].grad = None
        yield
        tied = {name: own[name].grad for name in shared}
        for name, total in self.placement.sum_shared(session.transport, tied).items():
            own[name].grad = total
        if held:
            call.held_gradients[request] = {name: p.grad for name, p in own.items()}
        for name, before in aside.items():
            own[name].grad = before if held else _sum(before, own[name].grad)

    def release(self, call: Call, request: int) -> None:
        """The script has asked: gradients held aside are added to `.grad`."""
        for name, gradient in call.held_gradients.pop(request, {}).items():
            parameter = self.placement.placed[name]
            parameter.grad = _sum(parameter.grad, gradient)

    def synchronise(self, session: Session) -> None:
        """As DistributedDataParallel does: the mean gradient over pipelines, and the first one's changed buffers."""
        if session.mesh.num_pipelines == 1:
            return
        group = session.mesh.replica_group
        parameters = [p for p in self.placement.own.values() if p.requires_grad]
        buffers = self.placement.placed_buffers
        changed = (digests(buffers.values()) != self._buffers_were).tolist()  # batch_norm changes them without a mark
        flags = torch.tensor([*(p.grad is not None for p in parameters), *changed], dtype=torch.float32)
        flags = flags.to(session.device)
        dist.all_reduce(flags, group=group)  # a pipeline may not have used what another one has
        counts = flags.tolist()
        used = [p for p, count in zip(parameters, counts, strict=False) if count > 0]
        for same_dtype in _by_dtype(used):
            _average(same_dtype, group, session.mesh.num_pipelines)
        moved = [buffer for buffer, count in zip(buffers.values(), counts[len(parameters) :], strict=True) if count > 0]
        for same_dtype in _by_dtype(moved):
            flat = torch.cat([buffer.reshape(-1) for buffer in same_dtype])
            dist.broadcast(flat, group=group, group_src=0)
            for buffer, piece in zip(same_dtype, flat.split([b.numel() for b in same_dtype]), strict=True):
                buffer.copy_(piece.reshape(buffer.shape))
        self._buffers_were = digests(buffers.values())


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def _by_dtype(tensors: Sequence[_Tensor]) -> list[list[_Tensor]]:
    """For one message per dtype."""
    groups: dict[torch.dtype, list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _average(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup, number: int) -> None:
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    dist.all_reduce(flat, group=group)
    flat /= number
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        if parameter.grad is None:
            parameter.grad = piece.reshape(parameter.shape).clone()
        else:
            parameter.grad.copy_(piece.reshape(parameter.shape))


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
