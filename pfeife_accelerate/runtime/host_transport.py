"""Tensors between ranks of one host over their own connections instead of a process group.

Models: messages told apart by tag, receives filled in the order they were posted, sends that are complete at once (the
data are copied), a peer that has gone. A message waits in shared memory until the reader wants it, so a posted receive
holds no memory.
Ignores: ranks on other hosts (`RoutedTransport` sends those another way). Data of a GPU pass through the host's memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import final

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.arrivals import TimedReceive
from pfeife_accelerate.runtime.host_link import HostLink, Incoming
from pfeife_accelerate.runtime.moments import Mark
from pfeife_accelerate.runtime.transport import (
    AbstractTransport,
    PendingReceive,
    RankTransport,
    aborted,
    as_bytes,
    described,
    lost,
)

__all__ = ["HostTransport", "RoutedTransport"]


class _Peer:
    """What is known of one other rank: its connection, receives without a message, and messages without a receive."""

    def __init__(self, rank: int, link: HostLink) -> None:
        self.rank = rank
        self.link = link
        self.posted: dict[int, deque[_HostReceive]] = defaultdict(deque)
        self.early: dict[int, deque[Incoming]] = defaultdict(deque)

    def match(self, message: Incoming) -> None:
        """Give a message to the first receive posted for its tag."""
        waiting = self.posted.get(message.tag)
        if not waiting:
            self.early[message.tag].append(message)
            return
        waiting.popleft().message = message
        if not waiting:
            del self.posted[message.tag]

    def add(self, receive: _HostReceive) -> None:
        """Give a receive the first message that came early, or let it wait."""
        early = self.early.get(receive.tag)
        if not early:
            self.posted[receive.tag].append(receive)
            return
        receive.message = early.popleft()
        if not early:
            del self.early[receive.tag]


@final
class HostTransport(RankTransport):
    """Between ranks that share a host; `links` has all that this one talks to."""

    def __init__(self, rank: int, num_ranks: int, links: Mapping[int, HostLink]) -> None:
        super().__init__(rank, num_ranks)
        self._peers = {peer: _Peer(peer, link) for peer, link in links.items()}
        self._abort_reason: str | None = None

    @property
    def needs_order(self) -> bool:
        """No: messages are matched by tag."""
        return False

    @property
    def copies(self) -> bool:
        """Yes: the sender into shared memory, the reader out of it, and nobody else does anything."""
        return True

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Copy the tensor to where the peer will take it, and return."""
        if self._abort_reason is not None:
            raise aborted(self._abort_reason)
        if tensor.numel() == 0:
            return
        data = as_bytes(tensor)
        link = self._peers[peer].link
        try:
            link.send(data if data.device.type == "cpu" else data.cpu(), tag)
        except OSError as error:
            raise self._lost(peer, "it to receive", error) from error

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> PendingReceive:
        """Announce a receive and return."""
        if self._abort_reason is not None:
            raise aborted(self._abort_reason)
        receive = _HostReceive(self, shape, dtype, device, peer, tag)
        if 0 not in shape:
            self._peers[peer].add(receive)
        return receive

    def flush(self) -> None:
        """Return at once: sends are complete when they are made. What the peer has not read needs no tensor here.

        Raises: PfeifeError PF401 if a peer is gone to which something was under way.
        """
        for peer in self._peers.values():
            try:
                peer.link.check()
            except OSError as error:
                raise self._lost(peer.rank, "it to receive", error) from error

    def abort(self, reason: str) -> None:
        """Make later and blocked calls raise with this reason."""
        self._abort_reason = reason
        for peer in self._peers.values():
            peer.link.shutdown()

    def fill(self, receive: _HostReceive) -> torch.Tensor:
        """Block until the receive's message is there, and make it a tensor."""
        peer, shape, dtype = self._peers[receive.peer], receive.shape, receive.dtype
        what = described(shape, dtype, receive.tag)
        buffer = torch.empty(shape, dtype=dtype)
        if buffer.numel() == 0:
            return buffer
        self._waiting_for = peer.rank
        try:
            while receive.message is None:
                message = peer.link.receive()
                if message is not None:
                    peer.match(message)
            message, data = receive.message, as_bytes(buffer)
            receive.arrived_ns = message.sent_ns
            if message.num_bytes != data.numel():
                raise PfeifeError(
                    id="PF403",
                    what=f"rank {peer.rank} sent {message.num_bytes} bytes where rank {self._rank} expects {what}",
                )
            peer.link.take(message, data)
        except (OSError, EOFError) as error:
            raise self._lost(peer.rank, what, error) from error
        finally:
            self._waiting_for = None
        receive.message = None
        return buffer

    def _lost(self, peer: int, what: str, error: OSError | EOFError) -> PfeifeError:
        if self._abort_reason is not None:
            return aborted(self._abort_reason)
        return lost(peer, what, error)


@final
class _HostReceive(TimedReceive):
    __slots__ = ("_transport", "arrived_ns", "device", "dtype", "message", "peer", "shape", "tag")

    def __init__(
        self,
        transport: HostTransport,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        peer: int,
        tag: int,
    ) -> None:
        self._transport = transport
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.peer = peer
        self.tag = tag
        self.message: Incoming | None = None
        self.arrived_ns = 0

    @property
    def waited(self) -> tuple[Mark | None, Mark]:
        return None, self.arrived_ns

    def wait(self) -> torch.Tensor:
        buffer = self._transport.fill(self)
        return buffer if self.device.type == "cpu" else buffer.to(self.device)


@final
class RoutedTransport(AbstractTransport):
    """Ranks of this host by one transport, all others by another."""

    def __init__(self, host: HostTransport, on_host: frozenset[int], others: AbstractTransport) -> None:
        self._host = host
        self._on_host = on_host
        self._others = others

    @property
    def rank(self) -> int:
        """The own rank."""
        return self._others.rank

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._others.num_ranks

    @property
    def waiting_for(self) -> int | None:
        """The rank for which a blocking call waits at this moment."""
        on_host = self._host.waiting_for
        return self._others.waiting_for if on_host is None else on_host

    @property
    def needs_order(self) -> bool:
        """Whether one of them matches messages by order."""
        return self._host.needs_order or self._others.needs_order

    @property
    def copies(self) -> bool:
        """Whether ranks on this host do."""
        return self._host.copies

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return."""
        (self._host if peer in self._on_host else self._others).send(tensor, peer, tag)

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> PendingReceive:
        """Announce a receive and return."""
        transport = self._host if peer in self._on_host else self._others
        return transport.post_receive(shape, dtype, device, peer, tag)

    def flush(self) -> None:
        """Block until all own sends have completed."""
        self._host.flush()
        self._others.flush()

    def abort(self, reason: str) -> None:
        """Make later calls raise with this reason, and blocked ones where the backend can."""
        self._host.abort(reason)
        self._others.abort(reason)
