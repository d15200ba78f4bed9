"""Calls that a schedule may still be started for: held on every rank until no rank's script can reach their outputs.

Models: a script that drops an output on one rank and reads it on another; news of what a rank's script has dropped.
Ignores: calls whose last schedule this rank has run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pfeife_accelerate.runtime.remote import ControlPlane
from pfeife_accelerate.session.call import Call, Progress

_DROPPED = "dropped"


class OpenCalls:
    """One rank's open calls; `others` are the other ranks of the pipeline, as the control plane numbers them."""

    def __init__(self, control: ControlPlane, others: Sequence[int]) -> None:
        self._control = control
        self._others = tuple(others)
        self._calls: dict[int, Call] = {}
        self._told: set[int] = set()
        self._dropped_elsewhere: Counter[int] = Counter()
        self._not_asked: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._calls)

    def add(self, call: Call) -> None:
        """A new call in training: its schedules are still to come."""
        self._calls[call.number] = call
        self._not_asked.add(call.number)

    def asked(self, call: Call) -> None:
        """This rank's script has called `backward`."""
        self._not_asked.discard(call.number)

    def close(self, call: Call) -> None:
        """All of the call's schedules have run on this rank."""
        self._forget(call.number)

    def take_not_asked(self) -> bool:
        """Whether calls without `backward` were made since the last time. At one line of the script all ranks agree."""
        found = bool(self._not_asked)
        self._not_asked.clear()
        return found

    def tell(self) -> None:
        """Tell the others which calls' outputs this rank's script has dropped since the last time."""
        dropped = [n for n, call in self._calls.items() if n not in self._told and not call.reachable()]
        if dropped:
            self._told.update(dropped)
            self._control.post(self._others, _DROPPED, {"calls": list(dropped)})

    def listen(self) -> None:
        """Note what the others' scripts have dropped."""
        while (body := self._control.poll(_DROPPED)) is not None:
            numbers: Any = body["calls"]
            self._dropped_elsewhere.update(numbers)

    def free(self) -> None:
        """Let go of calls that nobody can reach. All schedules announced before the news must have been taken up."""
        for number in [n for n in self._calls if self._is_dropped(n)]:
            self._forget(number)

    def readable(self) -> list[Call]:
        """Calls that have not run and whose values this rank's script can still ask for."""
        return [c for c in self._calls.values() if c.progress is Progress.PENDING and c.reachable()]

    def _is_dropped(self, number: int) -> bool:
        return number in self._told and self._dropped_elsewhere[number] == len(self._others)

    def _forget(self, number: int) -> None:
        self._calls.pop(number, None)
        self._told.discard(number)
        if self._dropped_elsewhere[number] in (0, len(self._others)):
            del self._dropped_elsewhere[number]
