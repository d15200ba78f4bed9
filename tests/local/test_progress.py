"""A bar for a person who waits, a line for a log, nothing for what is quick."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from pfeife_accelerate.session.progress import MeasuringProgress

pytestmark = pytest.mark.local


class Clock:
    def __init__(self, step_s):
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


def shown(step_s, *, at_a_terminal, width=80):
    file = io.StringIO()
    console = Console(file=file, force_terminal=at_a_terminal, width=width, legacy_windows=False)
    with MeasuringProgress("measuring operations", console, Clock(step_s)) as progress:
        for done in range(11):
            progress(done, 10)
    return file.getvalue()


def test_what_is_quick_shows_nothing(caplog):
    caplog.set_level(logging.INFO, "pfeife_accelerate")
    assert shown(0.01, at_a_terminal=True) == shown(0.01, at_a_terminal=False) == ""
    assert not caplog.records


def test_a_person_at_a_terminal_sees_a_bar_that_goes_away():
    text = shown(0.4, at_a_terminal=True)
    assert "measuring operations" in text and "10/10" in text
    assert text.endswith("\x1b[2K")  # the line is erased


def test_a_log_gets_one_line(caplog):
    caplog.set_level(logging.INFO, "pfeife_accelerate")
    assert shown(0.4, at_a_terminal=False) == ""
    (record,) = caplog.records
    assert "measuring operations: 2 of 10 after" in record.getMessage()


def test_a_failure_takes_the_bar_away():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, legacy_windows=False)
    with pytest.raises(RuntimeError), MeasuringProgress("measuring", console, Clock(2.0)) as progress:
        progress(0, 10)
        raise RuntimeError
    assert file.getvalue().endswith("\x1b[2K")
