"""How far a long measurement is: a bar for a person at a terminal, one line of the log for everybody else.

Models: nothing is shown of what takes no longer than about a second.
Ignores: other ranks; only the one that measures makes one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pfeife_accelerate.log import get_logger

_LOG = get_logger(__name__)
_PATIENCE_S = 1.0


class MeasuringProgress:
    """A context to be called with (done, total)."""

    def __init__(
        self, what: str, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._what = what
        self._console = console if console is not None else Console(file=sys.stderr)
        self._clock = clock
        self._start_s = clock()
        self._bar: Progress | None = None
        self._is_told = False

    def __call__(self, done: int, total: int) -> None:
        """Show how many of how many are done, once that takes long."""
        if not self._is_told and done < total and self._clock() - self._start_s > _PATIENCE_S:
            self._is_told = True
            if self._console.is_terminal:
                self._bar = Progress(
                    TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    console=self._console, transient=True,
                )  # fmt: skip
                self._bar.add_task(self._what, total=total)
                self._bar.start()
            else:
                _LOG.info("%s: %d of %d after %.0f s", self._what, done, total, self._clock() - self._start_s)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __enter__(self) -> MeasuringProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away, whatever happened."""
        if self._bar is not None:
            self._bar.stop()
