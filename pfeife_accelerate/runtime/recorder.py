"""When each action of a rank really ran: notes taken while the executor works through its list.

Models: a computation lasts from the end of the action before it to its own, less what it waits for; it is taken to wait
first. A transfer starts when it is given to the transport, and ends when the other rank has it.
Ignores: other ranks' clocks, and what happens inside an action.
"""

from __future__ import annotations

from typing import final

import torch

from pfeife_accelerate.ir.actions import Action
from pfeife_accelerate.ir.record import ClockFit, RankRecord
from pfeife_accelerate.runtime.arrivals import Taken, TimedReceive, Watchers, noted_in_stream
from pfeife_accelerate.runtime.moments import Mark, Moments, moments_of
from pfeife_accelerate.runtime.transport import (
    AbstractTransport,
    DistributedReceive,
    PendingReceive,
    WrappingTransport,
)

__all__ = ["Recorder"]


@final
class Recorder:
    """Takes notes of one rank, step by step; `transport` is to be used in place of the rank's own.

    `waits_in_stream`: waiting for a receive does not stop the host (nccl).
    """

    def __init__(self, transport: AbstractTransport, device: torch.device, *, waits_in_stream: bool = False) -> None:
        self._moments: Moments = moments_of(device)
        self.transport = _RecordingTransport(transport, self._moments, device, waits_in_stream=waits_in_stream)
        self.begin()

    def begin(self) -> None:
        """Before the first action of a step."""
        self._compute: list[tuple[Action, Mark, Mark, list[tuple[Mark, Mark]]]] = []
        self._sends: list[tuple[Action, Mark, Mark]] = []
        self._receives: list[tuple[Action, list[TimedReceive]]] = []
        self.transport.begin_action()
        self._latest = self._moments.now()

    def ended(self, action: Action) -> None:
        """The executor has done one action of its list; a send or receive of it has been started."""
        transport, begin = self.transport, self._latest
        self._latest = self._moments.now()
        if action.kind.is_compute:
            self._compute.append((action, begin, self._latest, transport.waits))
        elif transport.posted:
            self._receives.append((action, transport.posted))
        elif transport.has_sent:
            self._sends.append((action, begin, self._latest))
        transport.begin_action()

    def skip(self) -> None:
        """The executor has done something that is no action."""
        self._latest = self._moments.now()

    def record(self, rank: int, clock: ClockFit) -> RankRecord:
        """The step's notes, once it is over."""
        read = self._moments.read_ns
        return RankRecord(
            rank=rank,
            compute=tuple(
                (str(action), read(begin) + sum(read(there) - read(since) for since, there in waits), read(end))
                for action, begin, end, waits in self._compute
            ),
            sends=tuple((str(action), read(start), read(end)) for action, start, end in self._sends),
            receives=tuple((str(action), *self._waited_ns(posted)) for action, posted in self._receives),
            clock=clock,
        )

    def _waited_ns(self, posted: list[TimedReceive]) -> tuple[int | None, int]:
        """From the first tensor of a message to the last."""
        waits = [receive.waited for receive in posted]
        begins = [self._moments.read_ns(begin) for begin, _ in waits if begin is not None]
        return min(begins, default=None), max(self._moments.read_ns(end) for _, end in waits)

    def close(self) -> None:
        """End the threads."""
        self.transport.close()


@final
class _RecordingTransport(WrappingTransport):
    """Passes everything on, and notes when; what it noted belongs to the action that the executor ends next."""

    def __init__(
        self, inner: AbstractTransport, moments: Moments, device: torch.device, *, waits_in_stream: bool
    ) -> None:
        super().__init__(inner)
        self._moments = moments
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] | None = {} if waits_in_stream else None
        self._watchers = Watchers()
        self.begin_action()

    def begin_action(self) -> None:
        self.has_sent = False
        self.posted: list[TimedReceive] = []
        self.waits: list[tuple[Mark, Mark]] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.has_sent = True
        self._inner.send(tensor, peer, tag)

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> PendingReceive:
        receive = self._timed(self._inner.post_receive(shape, dtype, device, peer, tag), peer)
        self.posted.append(receive)
        return _RecordedReceive(self, receive)

    def _timed(self, receive: PendingReceive, peer: int) -> TimedReceive:
        if isinstance(receive, TimedReceive):
            return receive
        if self._streams is None:
            return (
                self._watchers.watch(receive, peer)
                if isinstance(receive, DistributedReceive)
                else Taken(receive, self._moments)
            )
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(self._device)
        return noted_in_stream(receive, self._streams[peer], self._moments)

    def close(self) -> None:
        self._watchers.close()

    def wait(self, receive: TimedReceive) -> torch.Tensor:
        begin = self._moments.now()
        tensor = receive.wait()
        self.waits.append((begin, self._moments.now()))
        return tensor


@final
class _RecordedReceive(PendingReceive):
    __slots__ = ("_receive", "_transport")

    def __init__(self, transport: _RecordingTransport, receive: TimedReceive) -> None:
        self._transport = transport
        self._receive = receive

    def wait(self) -> torch.Tensor:
        return self._transport.wait(self._receive)
