"""What a rank gives out to ranks that ask for tensors, while its main thread does something else.

Models: providers by kind, a logical clock that answers wait for, and a lock that keeps half-updated tensors unread.
Ignores: connections (remote.py), and where the tensors live: what is given out is a copy on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Condition, RLock
from typing import TypeAlias

import torch

from pfeife_accelerate.errors import PfeifeError

Provider: TypeAlias = "Callable[[str], torch.Tensor | None]"

#: Of a key and a number of changes: what the tensor was before these, or None where that is not known any more.
PastProvider: TypeAlias = "Callable[[str, int], torch.Tensor | None]"

# A rank may ask for a kind before this one's script has come to the line that serves it.
_SERVE_TIMEOUT_S = 60.0
_EARLY_TIMEOUT_S = 60.0
_EARLY_POLL_S = 0.001


class TooEarly(Exception):
    """Raised by a provider whose script has not come to the line yet at which the asking rank's is."""


class TensorServer:
    """Answers for one rank. `changed` is shared with its owner."""

    def __init__(self, rank: int, changed: Condition) -> None:
        self.busy = RLock()
        self.clock = 0
        self.changes = 0
        """How often what is served *of one moment* has changed; the same count means the same moment on all ranks."""
        self._rank = rank
        self._changed = changed
        self._providers: dict[str, Provider] = {}
        self._of_one_moment: dict[str, PastProvider | None] = {}
        self._is_stopped = False

    def serve(self, kind: str, provider: Provider, of_one_moment: bool, past: PastProvider | None = None) -> None:
        """Answer requests of a kind by a function that is called, under the lock, in a thread of the server.

        `of_one_moment`: where this rank has made more changes than the one that asks, `past` is asked instead.
        """
        with self._changed:
            if of_one_moment:
                self._of_one_moment[kind] = past
            self._providers[kind] = provider
            self._changed.notify_all()

    def advance_clock(self) -> None:
        """Let the requests for the next tick be answered."""
        with self._changed:
            self.clock += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """The script has ended: the clock stands still, and requests for later ticks are refused."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def snapshot(self, kind: str, keys: Sequence[str], clock: int, changes: int) -> list[torch.Tensor]:
        """Copies of the tensors, all of one moment at or after `clock`; blocks until the clock has come there.

        `changes` is the count of the rank that asks.
        """
        provider = self._provider_at(kind, clock, changes)
        deadline = time.monotonic() + _EARLY_TIMEOUT_S
        while True:
            try:
                return self._copies(provider, kind, keys, changes)
            except TooEarly as error:
                if self._is_stopped or time.monotonic() > deadline:
                    raise PfeifeError(id="PF410", what=f"rank {self._rank} has no such {kind} yet: {error}") from error
            time.sleep(_EARLY_POLL_S)

    def _copies(self, provider: Provider, kind: str, keys: Sequence[str], changes: int) -> list[torch.Tensor]:
        copies = []
        with self.busy:
            ahead = self.changes - changes if kind in self._of_one_moment else 0
            for key in keys:
                try:
                    tensor = provider(key) if ahead <= 0 else self._past(kind, key, ahead)
                    copy = None if tensor is None else _copy_to_cpu(tensor)
                except (PfeifeError, TooEarly):
                    raise
                except Exception as error:  # Whatever it is, it belongs to the rank that asked.
                    raise PfeifeError(
                        id="PF410",
                        what=f"rank {self._rank} could not give {kind} {key!r}",
                        why=f"{type(error).__name__}: {error}",
                    ) from error
                if copy is None:
                    raise PfeifeError(id="PF410", what=f"rank {self._rank} has no {kind} {key!r}")
                copies.append(copy)
        return copies

    def _past(self, kind: str, key: str, ahead: int) -> torch.Tensor:
        past = self._of_one_moment[kind]
        found = None if past is None else past(key, ahead)
        if found is not None:
            return found
        name = key.partition("/")[2] or key
        raise PfeifeError(
            id="PF414",
            what=f"{name!r} was asked for too late: rank {self._rank} has changed it meanwhile",
            why="a rank's optimizer steps without waiting for the others: between backward and optimizer.step a "
            "parameter of another rank may have its next value already; read it before backward or after the step",
        )

    def _provider_at(self, kind: str, clock: int, changes: int) -> Provider:
        with self._changed:
            first = changes if kind in self._of_one_moment else 0
            self._changed.wait_for(lambda: self._is_stopped or (self.clock >= clock and self.changes >= first))
            if self.clock < clock:
                raise PfeifeError(
                    id="PF412",
                    what=f"rank {self._rank} ended at tick {self.clock}, and {kind} was asked for as of tick {clock}",
                    why="the ranks of a pipeline must run the same script on the same data",
                )
            self._changed.wait_for(lambda: self._is_stopped or kind in self._providers, _SERVE_TIMEOUT_S)
            provider = self._providers.get(kind)
        if provider is None:
            raise PfeifeError(id="PF410", what=f"rank {self._rank} serves no {kind}")
        return provider


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
