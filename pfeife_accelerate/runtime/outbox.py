"""Started sends to one peer, each dropped as soon as it has completed.

Models: a backend whose sends know that they have completed only when they are waited for (gloo).
Ignores: the order in which sends with different tags complete; a tensor behind an unfinished one is freed late.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

import torch
import torch.distributed as dist


class Outbox:
    """Waits for sends in a thread of its own."""

    def __init__(self, peer: int) -> None:
        """Start the thread."""
        self.peer = peer
        self._error: RuntimeError | None = None
        self._queue: SimpleQueue[tuple[dist.Work, torch.Tensor] | threading.Event] = SimpleQueue()
        threading.Thread(target=self._run, name=f"pfeife-outbox-{peer}", daemon=True).start()

    def add(self, work: dist.Work, data: torch.Tensor) -> None:
        """Take over a started send."""
        self._queue.put((work, data))

    def flush(self) -> RuntimeError | None:
        """Block until all sends added so far have ended; the error of the last that failed, if any did."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        return self._error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                item[0].wait()
            except RuntimeError as error:
                self._error = error
            # Without this the tensor would live until the next send.
            del item
