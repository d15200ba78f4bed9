"""The watch over a main thread that waits for a rank that has ended."""

from __future__ import annotations

import gc
import sys

import pytest

from pfeife_accelerate.runtime import failure

pytestmark = pytest.mark.local


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_another_threads_frames_are_looked_at(monkeypatch, is_on: bool):
    was_on, during = gc.isenabled(), []
    current_frames = sys._current_frames

    def noted():
        during.append(gc.isenabled())
        return current_frames()

    monkeypatch.setattr(sys, "_current_frames", noted)
    try:
        (gc.enable if is_on else gc.disable)()
        assert failure._collective_of_main_thread() is None
        assert (during, gc.isenabled()) == ([False], is_on)
    finally:
        (gc.enable if was_on else gc.disable)()
