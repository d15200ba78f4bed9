"""Threads that are started while the interpreter ends."""

from __future__ import annotations

import threading

import pytest

from pfeife_accelerate.runtime.daemon import start_daemon

pytestmark = pytest.mark.local


def test_it_runs_with_its_arguments_under_its_name_and_keeps_nobody_waiting():
    found, done = [], threading.Event()

    def run(first: int, second: int) -> None:
        thread = threading.current_thread()
        found.append((first + second, thread.name, thread.daemon))
        done.set()

    start_daemon("a-name", run, 1, 2)
    assert done.wait(10)
    assert found == [(3, "a-name", True)]


@pytest.mark.parametrize("message", ["can't create new thread at interpreter shutdown", "can't start new thread"])
def test_only_the_end_of_the_interpreter_is_no_error(monkeypatch, message):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    if "shutdown" in message:
        start_daemon("a-name", print)
    else:
        with pytest.raises(RuntimeError, match="can't start"):
            start_daemon("a-name", print)
