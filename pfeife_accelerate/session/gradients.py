"""Gradients between the schedule that computes them and the script that asks for them.

Models: parameters tied across stages (their gradients are summed over the holding ranks), gradients computed before this
rank's script called `backward` (held aside, since the script may still zero its gradients), and the mean over pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.placement import Placement

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session


class GradientBook:
    """The own parameters' gradients of one model on one rank."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @contextmanager
    def collecting(self, call: Call, session: Session) -> Iterator[None]:
        """Around a schedule with backwards: afterwards `.grad` (or, if not asked for yet, `call.held_gradients`) is whole."""
        own, shared = self.placement.placed, self.placement.shared
        aside = {name: p.grad for name, p in own.items() if not call.asked or name in shared}
        for name in aside:
            own[name].grad = None
        yield
        trainable = {name: own[name].grad for name in shared if own[name].requires_grad}
        for name, total in self.placement.sum_shared(session.transport, trainable).items():
            own[name].grad = total
        if not call.asked:
            call.held_gradients = {name: p.grad for name, p in own.items()}
        for name, before in aside.items():
            own[name].grad = _sum(before, own[name].grad) if call.asked else before

    def release(self, call: Call) -> None:
        """The script has asked: gradients held aside are added to `.grad`."""
        for name, gradient in (call.held_gradients or {}).items():
            parameter = self.placement.placed[name]
            parameter.grad = _sum(parameter.grad, gradient)
        call.held_gradients = None

    def synchronise(self, session: Session) -> None:
        """Mean over the pipelines, as DistributedDataParallel computes it; one message per dtype."""
        number = session.mesh.num_pipelines
        if number == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in self.placement.own.values():
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, parameters in by_dtype.items():
            self._average(parameters, dtype, session)

    def _average(self, parameters: list[torch.nn.Parameter], dtype: torch.dtype, session: Session) -> None:
        group, number = session.mesh.replica_group, session.mesh.num_pipelines
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=parameters[0].device)
        dist.all_reduce(present, group=group)
        used = [p for p, count in zip(parameters, present.tolist(), strict=True) if count > 0]
        if not used:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in used])
        dist.all_reduce(flat, group=group)
        flat /= number
        for parameter, piece in zip(used, flat.split([p.numel() for p in used]), strict=True):
            if parameter.grad is None:
                parameter.grad = piece.reshape(parameter.shape).clone()
            else:
                parameter.grad.copy_(piece.reshape(parameter.shape))


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
