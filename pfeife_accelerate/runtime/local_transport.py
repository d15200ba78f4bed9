"""Tensors between threads of one process, with the rules of a real transport.

Models: a send that completes when its receive is posted, messages matched by tag, and, if asked, the order that a
backend without tags would need.
Ignores: time; messages are there at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import final

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.transport import PendingReceive, RankTransport, aborted, described

__all__ = ["LocalTransport"]


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
                raise aborted(self.abort_reason)
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
class LocalTransport(RankTransport):
    """Between threads of one process, with the rules of a real one: a send completes when its receive is posted."""

    def __init__(self, rank: int, num_ranks: int, exchange: _Exchange) -> None:
        super().__init__(rank, num_ranks)
        self._exchange = exchange

    @classmethod
    def make(cls, num_ranks: int, timeout_s: float = 60.0, check_pair_order: bool = False) -> list[LocalTransport]:
        """One transport a rank. `check_pair_order` refuses what a backend without tags could not carry."""
        exchange = _Exchange(timeout_s, check_pair_order)
        return [cls(rank, num_ranks, exchange) for rank in range(num_ranks)]

    @property
    def needs_order(self) -> bool:
        """Whether it behaves as if tags did not tell messages apart."""
        return self._exchange.check_pair_order

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return."""
        assert 0 <= peer < self._num_ranks, f"no rank {peer}"
        exchange, pair = self._exchange, (self._rank, peer, tag)
        # The copy is what a wire does: the two ranks must not share memory.
        message = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())
        with exchange.changed:
            if exchange.abort_reason is not None:
                raise aborted(exchange.abort_reason)
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
                raise aborted(exchange.abort_reason)
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
            what = f"rank {key[0]}: {described(tuple(expected.shape), expected.dtype, key[2])}"
            exchange.wait_for(lambda: key in exchange.messages, self._rank, what)
            self._waiting_for = None
            message = exchange.messages.pop(key)
        if message.shape != expected.shape or message.dtype != expected.dtype:
            sent, wanted = (described(tuple(t.shape), t.dtype, key[2]) for t in (message, expected))
            raise PfeifeError(id="PF403", what=f"rank {key[0]} sent {sent} where rank {self._rank} expects {wanted}")
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
