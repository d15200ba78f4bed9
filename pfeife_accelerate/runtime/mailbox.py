"""Messages that other ranks have pushed to this one, by topic, in order of arrival.

Models: a blocking take that ends at once when the pipeline fails, and regularly asks whether waiting still makes sense.
Ignores: how messages travel (remote.py), and who sent one: a sender that matters names itself in the message.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from threading import Condition

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.wire import Json

_ABANDON_EVERY_S = 0.5


class Mailbox:
    """The messages of one rank. `changed` is shared with its owner, who notifies on failure."""

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self._messages: defaultdict[str, deque[dict[str, Json]]] = defaultdict(deque)

    def put(self, topic: str, body: dict[str, Json]) -> None:
        """Add a message."""
        with self._changed:
            self._messages[topic].append(body)
            self._changed.notify_all()

    def poll(self, topic: str) -> dict[str, Json] | None:
        """Take the next message of a topic, if there is one."""
        with self._changed:
            messages = self._messages[topic]
            return messages.popleft() if messages else None

    def receive(
        self, topic: str, check: Callable[[], None], timeout: float | None, abandon: Callable[[], None] | None
    ) -> dict[str, Json]:
        """Block for the next message of a topic; `check` and, now and then, `abandon` may raise instead."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._wait(topic, check, deadline)
            if message is not None:
                return message
            if deadline is not None and time.monotonic() >= deadline:
                raise PfeifeError(id="PF422", what=f"no message on {topic!r} came within {timeout:g} s")
            if abandon is not None:
                # Without the lock: it may take its time, or post.
                abandon()

    def _wait(self, topic: str, check: Callable[[], None], deadline: float | None) -> dict[str, Json] | None:
        """Wait for a message until the deadline or the next time to ask whether to abandon."""
        until = time.monotonic() + _ABANDON_EVERY_S
        if deadline is not None:
            until = min(until, deadline)
        with self._changed:
            messages = self._messages[topic]
            while not messages:
                check()
                if not self._changed.wait(max(until - time.monotonic(), 0)) and not messages:
                    return None
            return messages.popleft()
