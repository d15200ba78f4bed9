"""Sums of the gradients of tied parameters over the ranks that hold them, in one schedule.

Models: the owner adds what the other holders send it, and sends them the sum: the same bits on every holder. A holder
sends its gradient as soon as no stage of its own adds to it any more, while other stages still run.
Ignores: gradients from before the schedule. Frozen parameters are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pfeife_accelerate.runtime.transport import AbstractTransport, PendingReceive
from pfeife_accelerate.session.placement import Placement

_TAG = 3 << 25
_PRESENCE_TAG = _TAG + (1 << 24)


class TiedSums:
    """The sums of one schedule on one rank; `.grad` of the tied parameters is what this rank has computed."""

    def __init__(self, placement: Placement, transport: AbstractTransport) -> None:
        self._placement = placement
        self._transport = transport
        self._open = sorted(name for name, parameter in placement.shared.items() if parameter.requires_grad)
        self._names = tuple(self._open)
        self._receives: dict[str, list[_Receive]] = {}

    def go_on(self, to_come: Collection[str]) -> None:
        """Own stages that still run read these states alone: start with the others."""
        if not self._transport.needs_order:  # there, the others do not know how much of the schedule is between
            self._start([name for name in self._open if name not in to_come])

    def finish(self) -> Mapping[str, torch.Tensor | None]:
        """After the schedule: the sums. A parameter that no holder has a gradient for has none."""
        self._start(list(self._open))
        sums = {name: self._sum(name) for name in self._names}
        self._transport.flush()
        return sums

    def _start(self, names: list[str]) -> None:
        for name in names:
            self._open.remove(name)
            owner, *others = self._placement.ranks_of[name]
            if self._placement.rank == owner:
                self._receives[name] = [_Receive(self, name, other) for other in others]
            else:
                self.send(name, self._placement.shared[name].grad, owner)

    def _sum(self, name: str) -> torch.Tensor | None:
        owner, *others = self._placement.ranks_of[name]
        if self._placement.rank != owner:
            return _Receive(self, name, owner).wait()
        own = self._placement.shared[name].grad
        total = None if own is None else own.clone()
        for receive in self._receives.pop(name):
            gradient = receive.wait()
            if gradient is not None:
                total = gradient if total is None else total.add_(gradient)
        for other in others:
            self.send(name, total, other)
        return total

    def send(self, name: str, gradient: torch.Tensor | None, peer: int) -> None:
        """Start sending a gradient, and whether there is any: the peer expects both."""
        parameter, tag = self._placement.shared[name], self._placement.tie_tag(name)
        is_there = torch.tensor([gradient is not None], dtype=torch.uint8, device=parameter.device)
        self._transport.send(is_there, peer, _PRESENCE_TAG + tag)
        sent = torch.zeros_like(parameter) if gradient is None else gradient
        self._transport.send(sent, peer, _TAG + tag)

    def post(self, name: str, peer: int) -> tuple[PendingReceive, PendingReceive]:
        """Announce the receives of both."""
        parameter, tag = self._placement.shared[name], self._placement.tie_tag(name)
        shape, device = tuple(parameter.shape), parameter.device
        is_there = self._transport.post_receive((1,), torch.uint8, device, peer, _PRESENCE_TAG + tag)
        return is_there, self._transport.post_receive(shape, parameter.dtype, device, peer, _TAG + tag)


class _Receive:
    """A gradient under way from another holder."""

    def __init__(self, sums: TiedSums, name: str, peer: int) -> None:
        self._is_there, self._gradient = sums.post(name, peer)

    def wait(self) -> torch.Tensor | None:
        is_there, gradient = bool(self._is_there.wait()), self._gradient.wait()
        return gradient if is_there else None
