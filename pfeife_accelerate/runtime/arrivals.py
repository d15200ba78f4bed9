"""Receives that know when their tensor came, whether or not anybody was waiting for it.

Models: a backend that tells so only to who waits (gloo): a thread for each peer waits in the order of posting, which is
the order of sending, and the executor waits for the thread; a backend whose waits are put into a stream (nccl): a
stream of its own waits and notes; one whose messages lie ready until they are taken: what taking them took is noted.
Ignores: a message that overtakes another one of its peer; it is noted late.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from queue import SimpleQueue
from time import perf_counter_ns
from typing import final

import torch

from pfeife_accelerate.runtime.moments import Mark, Moments
from pfeife_accelerate.runtime.transport import DistributedReceive, PendingReceive

__all__ = ["Taken", "TimedReceive", "Watchers", "noted_in_stream"]


class TimedReceive(PendingReceive):
    """A receive that knows when it was complete."""

    @property
    @abstractmethod
    def waited(self) -> tuple[Mark | None, Mark]:
        """Since when it was waited for (None: all the time), and when it was there.

        To be asked after the tensor has been waited for, or the schedule is over.
        """


class Watchers:
    """One thread for each peer, started at its first message."""

    def __init__(self) -> None:
        self._queues: dict[int, SimpleQueue[_Watched | None]] = {}

    def watch(self, receive: DistributedReceive, peer: int) -> TimedReceive:
        """From here on the thread waits for this receive: nobody else may."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = SimpleQueue()
            name = f"pfeife-arrivals-{peer}"
            threading.Thread(target=_wait_in_order, args=(queue,), name=name, daemon=True).start()
        watched = _Watched(receive)
        queue.put(watched)
        return watched

    def close(self) -> None:
        """Let the threads end after what they have been given."""
        for queue in self._queues.values():
            queue.put(None)
        self._queues.clear()


@final
class _Watched(TimedReceive):
    __slots__ = ("_arrived_ns", "_error", "_lock", "_receive", "_tensor")

    def __init__(self, receive: PendingReceive) -> None:
        self._receive: PendingReceive | None = receive
        self._tensor: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._arrived_ns = 0
        self._lock = threading.Lock()  # held until it has come: less work than an Event
        self._lock.acquire()

    def wait(self) -> torch.Tensor:
        self._lock.acquire()
        self._lock.release()
        if self._error is not None:
            raise self._error
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "a receive is waited for once"
        return tensor

    @property
    def waited(self) -> tuple[Mark | None, Mark]:
        with self._lock:
            return None, self._arrived_ns

    def fetch(self) -> None:
        """In the thread: wait, and note when it came."""
        assert self._receive is not None
        try:
            self._tensor = self._receive.wait()
        except BaseException as error:
            self._error = error  # raised where the tensor is wanted
        self._arrived_ns = perf_counter_ns()
        self._receive = None
        self._lock.release()


def _wait_in_order(queue: SimpleQueue[_Watched | None]) -> None:
    while (watched := queue.get()) is not None:
        watched.fetch()
        del watched  # the tensor must not live until the next one comes


@final
class _NotedInStream(TimedReceive):
    __slots__ = ("_mark", "_receive")

    def __init__(self, receive: PendingReceive, mark: Mark) -> None:
        self._receive = receive
        self._mark = mark

    def wait(self) -> torch.Tensor:
        return self._receive.wait()

    @property
    def waited(self) -> tuple[Mark | None, Mark]:
        return None, self._mark


def noted_in_stream(receive: PendingReceive, stream: torch.cuda.Stream, moments: Moments) -> TimedReceive:
    """Let a stream that does nothing else wait for the receive; the current one waits when the tensor is wanted."""
    with torch.cuda.stream(stream):
        receive.wait()
        return _NotedInStream(receive, moments.now())


@final
class Taken(TimedReceive):
    """A receive that nobody but the executor may wait for."""

    __slots__ = ("_marks", "_moments", "_receive")

    def __init__(self, receive: PendingReceive, moments: Moments) -> None:
        self._receive = receive
        self._moments = moments
        self._marks: tuple[Mark, Mark] | None = None

    def wait(self) -> torch.Tensor:
        """Take it, and note what that took."""
        begin = self._moments.now()
        tensor = self._receive.wait()
        self._marks = begin, self._moments.now()
        return tensor

    @property
    def waited(self) -> tuple[Mark | None, Mark]:
        """When taking it began and ended."""
        assert self._marks is not None, "what is posted is waited for"
        return self._marks
