"""Tensors between the ranks of one pipeline.

Models: non-blocking sends, receives that are posted before they are needed, messages told apart by (peer, tag).
Ignores: who sends what when; that is the schedule's. A tensor's shape and dtype are not sent: the receiver knows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
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

    @property
    @abstractmethod
    def needs_order(self) -> bool:
        """Whether both sides must send and post receives in equal order: tags do not tell messages apart."""

    @property
    def copies(self) -> bool:
        """Whether the ranks' own devices carry messages; see `LinkSpec.is_copied`."""
        return False

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


class RankTransport(AbstractTransport):
    """A transport that carries tensors itself: it knows its rank, and notes for whom it waits."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._waiting_for: int | None = None

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


class WrappingTransport(AbstractTransport):
    """Over another transport, which carries the tensors; sends and receives are changed or watched on the way."""

    def __init__(self, inner: AbstractTransport) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        """The own rank."""
        return self._inner.rank

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._inner.num_ranks

    @property
    def waiting_for(self) -> int | None:
        """The rank for which a blocking call waits at this moment."""
        return self._inner.waiting_for

    @property
    def needs_order(self) -> bool:
        """Whether messages are matched by order."""
        return self._inner.needs_order

    @property
    def copies(self) -> bool:
        """Whether the inner one's ranks copy."""
        return self._inner.copies

    def flush(self) -> None:
        """Block until all own sends have completed."""
        self._inner.flush()

    def abort(self, reason: str) -> None:
        """Make later calls raise with this reason, and blocked ones where the backend can."""
        self._inner.abort(reason)


@final
class DistributedTransport(RankTransport):
    """Over a process group of torch.distributed, as raw bytes so that every dtype works.

    With gloo, messages are matched by tag. With nccl, they are matched by order: the caller sends and posts receives
    in equal order for each (sender, receiver). There, both directions between two ranks share one stream, and two
    sends that meet would wait for each other: `reverse_group`, a second group of the same ranks, carries what goes to
    a lower rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, reverse_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._reverse_group = group if reverse_group is None else reverse_group
        self._tagged = _backend_for(group, device) == "gloo"
        self._abort_reason: str | None = None
        self._sent: deque[tuple[dist.Work, torch.Tensor, int]] = deque()
        self._outboxes: dict[int, Outbox] = {}

    @property
    def needs_order(self) -> bool:
        """Whether messages are matched by order (nccl), and not by tag, through the host's memory (gloo)."""
        return not self._tagged

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return."""
        if self._abort_reason is not None:
            raise aborted(self._abort_reason)
        if tensor.numel() == 0:
            return
        data = as_bytes(tensor)
        if self._tagged and data.device.type != "cpu":
            data = data.cpu()
        group = self._group if self._rank < peer else self._reverse_group
        try:
            work = dist.isend(data, group=group, group_dst=peer, tag=tag if self._tagged else 0)
        except RuntimeError as error:
            raise lost(peer, "it to receive", error) from error
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
            raise aborted(self._abort_reason)
        buffer = torch.empty(shape, dtype=dtype, device="cpu" if self._tagged else device)
        if buffer.numel() == 0:
            return DistributedReceive(self, None, buffer, device, peer, tag)
        group = self._group if peer < self._rank else self._reverse_group
        try:
            work = dist.irecv(as_bytes(buffer), group=group, group_src=peer, tag=tag if self._tagged else 0)
        except RuntimeError as error:
            raise lost(peer, _describe(buffer, tag), error) from error
        assert work is not None, "the own rank is part of the group"
        return DistributedReceive(self, work, buffer, device, peer, tag)

    def flush(self) -> None:
        """Block until all own sends have completed, and release them."""
        for outbox in self._outboxes.values():
            self._waiting_for = outbox.peer
            error = outbox.flush()
            if error is not None:
                raise lost(outbox.peer, "it to receive", error) from error
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
                raise aborted(self._abort_reason) from error
            raise lost(peer, what if isinstance(what, str) else _describe(what, tag), error) from error
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a vector of bytes; a copy only where the tensor is not contiguous."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that the group uses for a device: its description reads `cpu:gloo,cuda:nccl`."""
    by_device = dict(entry.split(":", 1) for entry in str(dist.get_backend_config(group)).split(","))
    return by_device[device.type]


def described(shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> str:
    """How errors call a tensor under way."""
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {tuple(shape)} (tag {tag})"


def _describe(tensor: torch.Tensor, tag: int) -> str:
    return described(tuple(tensor.shape), tensor.dtype, tag)


def lost(peer: int, what: str, error: Exception) -> PfeifeError:
    """The error for a peer that is gone, or late by more than the time limit."""
    text = str(error)
    if isinstance(error, TimeoutError) or "timed out" in text.lower() or "timeout" in text.lower():
        return PfeifeError(id="PF402", what=f"rank {peer} of the pipeline was late while waiting for {what}", why=text)
    return PfeifeError(id="PF401", what=f"rank {peer} of the pipeline went away while waiting for {what}", why=text)


def aborted(reason: str) -> PfeifeError:
    """The error of calls after an abort."""
    return PfeifeError(id="PF405", what=f"transfers between the ranks were stopped: {reason}")
