"""One failure ends all ranks of a pipeline, and is printed once.

Models: an uncaught exception, a non-zero `sys.exit` or a Ctrl-C in the main thread; the news that another rank failed;
errors that only follow from another rank's end; a main thread that does not come back; a script that ended too early.
Ignores: exceptions in other threads, `raise SystemExit(n)` without `sys.exit`, and `os._exit` (a rank that ends without
a word, as seen by the others).
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn, final

import torch.distributed as dist

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.daemon import start_daemon
from pfeife_accelerate.runtime.remote import ControlPlane, Failure

# What a rank meets when another one has gone. Each may also come first, and then it is the error to print.
_FOLLOWING_IDS = frozenset({"PF401", "PF402", "PF405", "PF411", "PF412", "PF420", "PF421", "PF422"})
_FOLLOWING_TEXTS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")
_NEWS_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_S = 1.0
_WATCH_EVERY_S = 0.5
# A collective without the ended rank may take its time.
_COLLECTIVES_TAKE = 3
_COLLECTIVES_FILE = os.path.join("torch", "distributed", "distributed_c10d.py")
_COLLECTION_OFF = threading.Lock()
_WRAPPERS_FILE = os.path.join("torch", "distributed", "c10d_logger.py")


def install(control_plane: ControlPlane, rank: int, pipeline_size: int, stop_after_s: float = 5.0) -> FailureGuard:
    """Guard this process from now on. `uninstall` of what is returned undoes it."""
    guard = FailureGuard(control_plane, rank, pipeline_size, stop_after_s)
    guard.install()
    return guard


@final
class FailureGuard:
    """What a process does when it, or another rank, fails or ends."""

    def __init__(self, plane: ControlPlane, rank: int, pipeline_size: int, stop_after_s: float) -> None:
        self._plane = plane
        self._name = f"[pfeife rank {rank}/{pipeline_size}]"
        self._rank = rank
        self._stop_after_s = stop_after_s
        self._pid = os.getpid()
        self._is_active = False
        self._previous_excepthook = sys.excepthook
        self._previous_exit = sys.exit
        # Bound methods are made anew at each access; these are what `uninstall` compares with.
        self._excepthook = self._on_exception
        self._exit = self._on_sys_exit
        self._waiting_for: Callable[[], int | None] | None = None
        self._saying = threading.Lock()
        self._has_said_stopped = False
        self._has_failed = False
        self._exit_note: tuple[object, str] | None = None
        self._cancelled = threading.Event()

    def install(self) -> None:
        """Put the hooks in place."""
        self._is_active = True
        self._previous_excepthook, sys.excepthook = sys.excepthook, self._excepthook
        self._previous_exit, sys.exit = sys.exit, self._exit
        atexit.register(self._at_exit)
        self._plane.on_goodbye = self._on_goodbye
        self._plane.on_failure = self._on_failure_of_another
        failure = self._plane.failure
        if failure is not None:
            self._on_failure_of_another(failure)

    def uninstall(self) -> None:
        """Take the hooks out. One that somebody has wrapped since stays in the chain and does nothing."""
        self._is_active = False
        self._cancelled.set()
        if sys.excepthook is self._excepthook:
            sys.excepthook = self._previous_excepthook
        if sys.exit is self._exit:
            sys.exit = self._previous_exit
        atexit.unregister(self._at_exit)
        self._plane.on_goodbye = None
        self._plane.on_failure = None

    def watch(self, waiting_for: Callable[[], int | None]) -> None:
        """Learn for which rank the main thread waits, to notice that it waits for one whose script has ended."""
        self._waiting_for = waiting_for

    def note_exit(self, code: object, where: str) -> None:
        """Remember with which code the interpreter is ending; called by the exception that ends it."""
        self._exit_note = (code, where)

    # --- the own end

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self._is_here():
            self._previous_excepthook(kind, error, trace)
            return
        self._has_failed = True
        is_own = not self._follows_from_another(error) and self._may_speak()
        # From here on nothing waits for news; threads that are not daemons could keep the process for ever.
        self._end_later()
        if not is_own:
            return
        try:
            _say(f"{self._name} failed, stopping all ranks")
            self._previous_excepthook(kind, error, trace)
            _flush()
        finally:
            self._plane.report_failure("".join(traceback.format_exception_only(kind, error)))

    def _follows_from_another(self, error: BaseException) -> bool:
        """Whether another rank's failure explains this error; if so, that is said instead."""
        failure = self._plane.failure
        if failure is None and _is_communication_error(error):
            failure = self._plane.wait_for_failure(_NEWS_TIMEOUT_S)
        if failure is None or failure.rank == self._rank:
            return False
        self._say_stopped(failure)
        return True

    def _may_speak(self) -> bool:
        """Whether this rank's failure is the one to print; of several at once, the first of all ranks has the word."""
        if self._plane.claim_failure():
            return True
        failure = self._plane.wait_for_failure(_NEWS_TIMEOUT_S)
        if failure is None:
            # The one who had the word has gone without using it.
            return True
        self._say_stopped(failure)
        return False

    def _on_sys_exit(self, status: object = None, /) -> NoReturn:
        if not self._is_here():
            self._previous_exit(status)  # type: ignore[arg-type]
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        where = "?" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
        raise _ScriptExit(status, self, where)

    def _at_exit(self) -> None:
        if not self._is_here():
            return
        code, where = self._exit_note or (None, "")
        if code not in (None, 0) and not self._has_failed:
            self._has_failed = True
            if self._plane.failure is None and self._may_speak():
                text = f"exited with code {code}" if isinstance(code, int) else f"exited: {code}"
                _say(f"{self._name} {text} ({where}), stopping all ranks")
                self._plane.report_failure(f"SystemExit: {text} ({where})")
            self._end_later()
        self._plane.close(wait_for_others=not self._has_failed)
        failure = self._plane.failure
        if failure is not None and not self._has_failed:
            # The script itself ended well; only the process can still tell the launcher that the run did not.
            self._say_stopped(failure)
            _end_process()

    # --- the others' end

    def _on_failure_of_another(self, failure: Failure) -> None:
        if self._is_here():
            self._say_stopped(failure)
            self._end_later()

    def _say_stopped(self, failure: Failure) -> None:
        with self._saying:
            if not self._has_said_stopped:
                self._has_said_stopped = True
                _say(f"{self._name} stopped because rank {failure.rank} failed: {failure.first_line}")

    def _on_goodbye(self, rank: int) -> None:
        if self._waiting_for is not None:
            start_daemon("pfeife-watch", self._watch_for, rank)

    def _watch_for(self, ended: int) -> None:
        """Fail if the main thread keeps waiting for a rank that has ended: what it sent before is long here."""
        since_s, waits_at = time.monotonic(), None
        while self._is_here() and self._plane.failure is None and self._waiting_for is not None:
            waits_for = self._waiting_for()
            in_collective = _collective_of_main_thread() if waits_for is None else None
            before, waits_at = waits_at, (waits_for, in_collective)
            limit_s = self._stop_after_s * (1 if in_collective is None else _COLLECTIVES_TAKE)
            if waits_at != before or (waits_for != ended and in_collective is None):
                since_s = time.monotonic()
            elif time.monotonic() - since_s > limit_s:
                what = "it" if in_collective is None else f"all ranks in a collective ({in_collective[0]})"
                if self._may_speak():
                    text = f"rank {ended}'s script has ended, and rank {self._rank} still waits for {what}"
                    _say(f"{self._name} failed, stopping all ranks: {text}")
                    self._plane.report_failure(text)
                _end_process()
            if self._cancelled.wait(_WATCH_EVERY_S):
                return

    def _is_here(self) -> bool:
        # A forked process inherits the hooks but not the pipeline.
        return self._is_active and os.getpid() == self._pid

    def _end_later(self) -> None:
        """End the process in a while, whatever its main thread is doing by then."""

        def end() -> None:
            if not self._cancelled.wait(self._stop_after_s):
                _end_process()

        start_daemon("pfeife-end", end)


class _ScriptExit(SystemExit):
    """A `SystemExit` that knows whether it ends the process.

    The interpreter calls no hook for `SystemExit`, and a script may catch it. But the one that ends the process is
    dropped by the interpreter itself, when no Python code runs any more: then nobody is the caller of `__del__`.
    """

    def __init__(self, status: object, guard: FailureGuard, where: str) -> None:
        super().__init__(status)
        self._guard = guard
        self._where = where

    def __del__(self) -> None:
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None and threading.current_thread() is threading.main_thread():
            self._guard.note_exit(self.code, self._where)


def _is_communication_error(error: BaseException) -> bool:
    """Whether the error, or one that it came from, may be the mere consequence of another rank's end."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, PfeifeError):
            if cause.id in _FOLLOWING_IDS:
                return True
        elif isinstance(cause, (dist.DistError, ConnectionError, EOFError)):
            return True
        elif isinstance(cause, RuntimeError):
            text = str(cause).lower()
            if any(known in text for known in _FOLLOWING_TEXTS):
                return True
        cause = cause.__cause__ or cause.__context__
    return False


def _collective_of_main_thread() -> tuple[str, int, int] | None:
    """Where the main thread is inside a collective of torch.distributed: source line, frame, instruction; or None."""
    with _without_collection():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        inner = None if frame is None else (id(frame), frame.f_lasti)
        is_inside = False
        while frame is not None:
            in_torch = frame.f_code.co_filename.endswith(_COLLECTIVES_FILE)
            if (
                is_inside
                and not in_torch
                and inner is not None
                and not frame.f_code.co_filename.endswith(_WRAPPERS_FILE)
            ):
                return (f"{frame.f_code.co_filename}:{frame.f_lineno}", *inner)
            is_inside = is_inside or in_torch
            frame = frame.f_back
        return None


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage is collected as long as the context lasts: for a look at another thread's frames.

    A collection may free a tensor, which lets other threads run. In the middle of such a look, the interpreter (3.11.7
    at least) is not ready for that: a thread that ends waits for its lock on threads, and no thread goes on; a frame
    that ends is used after that.
    """
    with _COLLECTION_OFF:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def _say(line: str) -> None:
    # One write, so that the ranks' lines do not mix.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _flush() -> None:
    """Write out what is buffered, unless somebody holds the stream."""

    def flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    thread = threading.Thread(target=flush, name="pfeife-flush", daemon=True)
    thread.start()
    thread.join(_FLUSH_TIMEOUT_S)


def _end_process() -> NoReturn:
    _flush()
    os._exit(1)
