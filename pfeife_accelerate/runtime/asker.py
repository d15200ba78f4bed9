"""Requests for other ranks' tensors, each on a connection that no other request uses meanwhile.

Models: connections kept for the next request; requests under way that are all ended at once.
Ignores: why a connection broke; the control plane knows.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.wire import Json, Wire


class Asker:
    """Asks for one rank. `connect(rank)` opens a connection on which that rank answers."""

    def __init__(self, connect: Callable[[int], Wire]) -> None:
        self._connect = connect
        self._lock = Lock()
        self._idle: dict[int, list[Wire]] = {}
        self._in_use: set[Wire] = set()

    def ask(
        self, rank: int, request: dict[str, Json], check: Callable[[], None], timeout_s: float | None
    ) -> list[torch.Tensor]:
        """The tensors asked for, or the other rank's error. `check` is called once the request can be interrupted."""
        with self._lock:
            idle = self._idle.get(rank)
            wire = idle.pop() if idle else None
        if wire is None:
            wire = self._connect(rank)
        with self._lock:
            self._in_use.add(wire)
        is_answered = False
        try:
            check()
            wire.send(request)
            reply = wire.receive(timeout_s)
            error = reply.get("error")
            tensors = [] if error is not None else wire.receive_tensors(reply, timeout_s)
            is_answered = True
        finally:
            with self._lock:
                self._in_use.discard(wire)
                if is_answered:
                    self._idle.setdefault(rank, []).append(wire)
            if not is_answered:
                # The next to use this connection would read the wrong answer.
                wire.close()
        if error is not None:
            raise _decoded(error)
        return tensors

    def interrupt(self) -> None:
        """End all requests under way: they raise `EOFError` or `OSError`."""
        with self._lock:
            wires = list(self._in_use)
        for wire in wires:
            wire.shutdown()

    def close(self) -> None:
        """Free the connections kept for later."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for wires in idle.values():
            for wire in wires:
                wire.close()

    def wires(self) -> list[Wire]:
        """All connections."""
        return [*self._in_use, *(wire for idle in self._idle.values() for wire in idle)]


def encoded_error(error: PfeifeError) -> dict[str, Json]:
    """An error as the answer to a request."""
    return {"error": [error.id, error.what, error.where, error.why]}


def _decoded(error: list[str | None]) -> PfeifeError:
    id, what, where, why = error
    return PfeifeError(id=str(id), what=str(what), where=where, why=why)
