"""Tensors between the ranks of one pipeline.

Models: non-blocking sends, receives that are posted before they are needed, messages told apart by (peer, tag).
Ignores: who sends what when; that is the schedule's. A tensor's shape and dtype are not sent: the receiver knows them.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import final

import torch
import torch.distributed as dist

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.outbox import Outbox

# Gloo sends complete only when waited for. A thread waits for those from this size on, to free them during the step.
_RELEASE_EARLY_BYTES = 64 * 1024


class PendingReceive(ABC):
    """A receive that has been posted."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Block until the tensor is there, and return it."""


class AbstractTransport(ABC):
    """Sends and receives tensors between ranks `0 .. num_ranks - 1`."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The own rank."""

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """How many ranks there are."""

    @property
    @abstractmethod
    def waiting_for(self) -> int | None:
        """The rank for which a blocking call waits at this moment; to be read from another thread."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return. The tensor is kept alive until sent; it must not be changed before `flush`."""

    @abstractmethod
    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> PendingReceive:
        """Announce a receive and return. Receives of the same peer and tag are filled in the order they were posted."""

    @abstractmethod
    def flush(self) -> None:
        """Block until all own sends have completed, and release them. Call it at the end of a schedule."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make later calls raise with this reason, and blocked ones where the backend can."""


@final
class DistributedTransport(AbstractTransport):
    """Over a process group of torch.distributed, as raw bytes so that every dtype works.

    With gloo, messages are matched by tag. With nccl, they are matched by order: the caller sends and posts receives
    in equal order for each (sender, receiver). There, both directions between two ranks share one stream, and two
    sends that meet would wait for each other: `reverse_group`, a second group of the same ranks, carries what goes to
    a lower rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, reverse_group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        self._reverse_group = group if reverse_group is None else reverse_group
        self._rank = dist.get_rank(group)
        self._num_ranks = dist.get_world_size(group)
        self._tagged = _backend_for(group, device) == "gloo"
        self._waiting_for: int | None = None
        self._abort_reason: str | None = None
        self._sent: deque[tuple[dist.Work, torch.Tensor, int]] = deque()
        self._outboxes: dict[int, Outbox] = {}

    @property
    def rank(self) -> int:
        """The own rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._num_ranks

    @property
    def waiting_for(self) -> int | None:
        """The rank for which a blocking call waits at this moment."""
        return self._waiting_for

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return."""
        if self._abort_reason is not None:
            raise _aborted(self._abort_reason)
        if tensor.numel() == 0:
            return
        data = _as_bytes(tensor)
        if self._tagged and data.device.type != "cpu":
            data = data.cpu()
        group = self._group if self._rank < peer else self._reverse_group
        try:
            work = dist.isend(data, group=group, group_dst=peer, tag=tag if self._tagged else 0)
        except RuntimeError as error:
            raise _lost(peer, "it to receive", error) from error
        assert work is not None, "the own rank is part of the group"
        if not self._tagged:
            self._release_completed()
            self._sent.append((work, data, peer))
        elif data.numel() < _RELEASE_EARLY_BYTES:
            self._sent.append((work, data, peer))
        else:
            outbox = self._outboxes.get(peer)
            if outbox is None:
                outbox = self._outboxes[peer] = Outbox(peer)
            outbox.add(work, data)

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> PendingReceive:
        """Announce a receive and return."""
        if self._abort_reason is not None:
            raise _aborted(self._abort_reason)
        buffer = torch.empty(shape, dtype=dtype, device="cpu" if self._tagged else device)
        if buffer.numel() == 0:
            return DistributedReceive(self, None, buffer, device, peer, tag)
        group = self._group if peer < self._rank else self._reverse_group
        try:
            work = dist.irecv(_as_bytes(buffer), group=group, group_src=peer, tag=tag if self._tagged else 0)
        except RuntimeError as error:
            raise _lost(peer, _describe(buffer, tag), error) from error
        assert work is not None, "the own rank is part of the group"
        return DistributedReceive(self, work, buffer, device, peer, tag)

    def flush(self) -> None:
        """Block until all own sends have completed, and release them."""
        for outbox in self._outboxes.values():
            self._waiting_for = outbox.peer
            error = outbox.flush()
            if error is not None:
                raise _lost(outbox.peer, "it to receive", error) from error
        while self._sent:
            work, _, peer = self._sent.popleft()
            self.wait(work, peer, "it to receive")
        self._waiting_for = None

    def abort(self, reason: str) -> None:
        """Make later calls raise. Calls blocked in gloo cannot be woken: only the end of the process ends them."""
        self._abort_reason = reason
        if not self._tagged:
            self._group.abort()
            if self._reverse_group is not self._group:
                self._reverse_group.abort()

    def wait(self, work: dist.Work, peer: int, what: torch.Tensor | str, tag: int = 0) -> None:
        """Wait for one operation; a dead peer becomes a `PfeifeError`."""
        self._waiting_for = peer
        try:
            work.wait()
        except RuntimeError as error:
            if self._abort_reason is not None:
                raise _aborted(self._abort_reason) from error
            raise _lost(peer, what if isinstance(what, str) else _describe(what, tag), error) from error
        finally:
            self._waiting_for = None

    def _release_completed(self) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()


@final
class DistributedReceive(PendingReceive):
    """A receive that makes progress by itself. With gloo, any thread may wait for it, once."""

    __slots__ = ("_buffer", "_device", "_peer", "_tag", "_transport", "_work")

    def __init__(
        self,
        transport: DistributedTransport,
        work: dist.Work | None,
        buffer: torch.Tensor,
        device: torch.device,
        peer: int,
        tag: int,
    ) -> None:
        self._transport = transport
        self._work = work
        self._buffer = buffer
        self._device = device
        self._peer = peer
        self._tag = tag

    def wait(self) -> torch.Tensor:
        """Block until the tensor is there, and return it."""
        if self._work is not None:
            self._transport.wait(self._work, self._peer, self._buffer, self._tag)
        return self._buffer if self._buffer.device == self._device else self._buffer.to(self._device)


class _Exchange:
    """What the ranks of a `LocalTransport` share: one lock, and messages by (sender, receiver, tag, count)."""

    def __init__(self, timeout_s: float, check_pair_order: bool) -> None:
        self.timeout_s = timeout_s
        self.check_pair_order = check_pair_order
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.posted: Counter[tuple[int, int, int]] = Counter()
        self.sent_tags: dict[tuple[int, int], list[int]] = {}
        self.posted_tags: dict[tuple[int, int], list[int]] = {}
        self.abort_reason: str | None = None

    def wait_for(self, is_done: Callable[[], bool], rank: int, what: str) -> None:
        """Block until `is_done`; the caller holds the lock."""
        deadline = time.monotonic() + self.timeout_s
        while not is_done():
            if self.abort_reason is not None:
                raise _aborted(self.abort_reason)
            if not self.changed.wait(deadline - time.monotonic()) and not is_done():
                raise PfeifeError(id="PF402", what=f"rank {rank} waited {self.timeout_s:g} s for {what}")

    def is_posted(self, pair: tuple[int, int, int], count: int) -> bool:
        return self.posted[pair] >= count

    def note(self, tags: dict[tuple[int, int], list[int]], sender: int, receiver: int, tag: int) -> None:
        """Keep the order of tags of a pair, and compare what is known of both sides."""
        tags.setdefault((sender, receiver), []).append(tag)
        ours = self.sent_tags.get((sender, receiver), [])
        theirs = self.posted_tags.get((sender, receiver), [])
        count = min(len(ours), len(theirs))
        if ours[count - 1 : count] != theirs[count - 1 : count]:
            raise PfeifeError(
                id="PF404",
                what=f"message {count} from rank {sender} to rank {receiver} is sent with tag {ours[count - 1]} "
                f"and received with tag {theirs[count - 1]}",
                why="a backend without tags needs equal order on both sides",
            )


@final
class LocalTransport(AbstractTransport):
    """Between threads of one process, with the rules of a real one: a send completes when its receive is posted."""

    def __init__(self, rank: int, num_ranks: int, exchange: _Exchange) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._exchange = exchange
        self._waiting_for: int | None = None

    @classmethod
    def make(cls, num_ranks: int, timeout_s: float = 60.0, check_pair_order: bool = False) -> list[LocalTransport]:
        """One transport a rank. `check_pair_order` refuses what a backend without tags could not carry."""
        exchange = _Exchange(timeout_s, check_pair_order)
        return [cls(rank, num_ranks, exchange) for rank in range(num_ranks)]

    @property
    def rank(self) -> int:
        """The own rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._num_ranks

    @property
    def waiting_for(self) -> int | None:
        """The rank for which a blocking call waits at this moment."""
        return self._waiting_for

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return."""
        assert 0 <= peer < self._num_ranks, f"no rank {peer}"
        exchange, pair = self._exchange, (self._rank, peer, tag)
        # The copy is what a wire does: the two ranks must not share memory.
        message = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())
        with exchange.changed:
            if exchange.abort_reason is not None:
                raise _aborted(exchange.abort_reason)
            if exchange.check_pair_order and tensor.numel() > 0:
                exchange.note(exchange.sent_tags, *pair)
            exchange.messages[(*pair, exchange.sent[pair])] = message
            exchange.sent[pair] += 1
            exchange.changed.notify_all()

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> PendingReceive:
        """Announce a receive and return."""
        assert 0 <= peer < self._num_ranks, f"no rank {peer}"
        exchange, pair = self._exchange, (peer, self._rank, tag)
        expected = torch.empty(shape, dtype=dtype, device="meta")
        with exchange.changed:
            if exchange.abort_reason is not None:
                raise _aborted(exchange.abort_reason)
            if exchange.check_pair_order and expected.numel() > 0:
                exchange.note(exchange.posted_tags, *pair)
            key = (*pair, exchange.posted[pair])
            exchange.posted[pair] += 1
            exchange.changed.notify_all()
        return _LocalReceive(self, key, expected, device)

    def flush(self) -> None:
        """Block until a receive has been posted for every own send."""
        exchange = self._exchange
        with exchange.changed:
            for pair, count in list(exchange.sent.items()):  # others send while this one waits
                if pair[0] == self._rank:
                    self._waiting_for = pair[1]
                    what = f"rank {pair[1]} to receive tag {pair[2]}"
                    exchange.wait_for(partial(exchange.is_posted, pair, count), self._rank, what)
        self._waiting_for = None

    def abort(self, reason: str) -> None:
        """Make later and blocked calls of all ranks raise with this reason."""
        with self._exchange.changed:
            self._exchange.abort_reason = reason
            self._exchange.changed.notify_all()

    def take(self, key: tuple[int, int, int, int], expected: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Block until the message with this key is there, and hand it over."""
        exchange = self._exchange
        with exchange.changed:
            self._waiting_for = key[0]
            what = f"rank {key[0]}: {_describe(expected, key[2])}"
            exchange.wait_for(lambda: key in exchange.messages, self._rank, what)
            self._waiting_for = None
            message = exchange.messages.pop(key)
        if message.shape != expected.shape or message.dtype != expected.dtype:
            raise PfeifeError(
                id="PF403",
                what=f"rank {key[0]} sent {_describe(message, key[2])} where rank {self._rank} "
                f"expects {_describe(expected, key[2])}",
            )
        return message.to(device)


@final
class _LocalReceive(PendingReceive):
    __slots__ = ("_device", "_expected", "_key", "_transport")

    def __init__(
        self, transport: LocalTransport, key: tuple[int, int, int, int], expected: torch.Tensor, device: torch.device
    ) -> None:
        self._transport = transport
        self._key = key
        self._expected = expected
        self._device = device

    def wait(self) -> torch.Tensor:
        return self._transport.take(self._key, self._expected, self._device)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a vector of bytes; a copy only where the tensor is not contiguous."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that the group uses for a device: its description reads `cpu:gloo,cuda:nccl`."""
    by_device = dict(entry.split(":", 1) for entry in str(dist.get_backend_config(group)).split(","))
    return by_device[device.type]


def _describe(tensor: torch.Tensor, tag: int) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)} (tag {tag})"


def _lost(peer: int, what: str, error: RuntimeError) -> PfeifeError:
    text = str(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return PfeifeError(id="PF402", what=f"rank {peer} of the pipeline was late while waiting for {what}", why=text)
    return PfeifeError(id="PF401", what=f"rank {peer} of the pipeline went away while waiting for {what}", why=text)


def _aborted(reason: str) -> PfeifeError:
    return PfeifeError(id="PF405", what=f"transfers between the ranks were stopped: {reason}")
