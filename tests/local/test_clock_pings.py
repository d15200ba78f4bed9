"""Clocks that show different times are read off each other over a transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from pfeife_accelerate.ir.record import ClockReading
from pfeife_accelerate.runtime.clock_pings import read_clock
from pfeife_accelerate.runtime.local_transport import LocalTransport

pytestmark = pytest.mark.local


def read_all(clocks: list[Callable[[], int]]) -> list[ClockReading]:
    found: dict[int, ClockReading] = {}

    def rank(transport: LocalTransport) -> None:
        found[transport.rank] = read_clock(transport, clocks[transport.rank])

    threads = [threading.Thread(target=rank, args=(t,)) for t in LocalTransport.make(len(clocks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(len(clocks))]


def shifted(by_ns: int) -> int:
    return time.perf_counter_ns() + by_ns


def test_shifted_clocks_are_found_within_the_error_that_is_told():
    shifts = [0, 10**12, -123_456_789]
    readings = read_all([partial(shifted, shift) for shift in shifts])
    assert readings[0].offset_ns == 0 and readings[0].error_ns == 0
    for reading, shift in zip(readings[1:], shifts[1:], strict=True):
        assert abs(reading.offset_ns + shift) <= reading.error_ns
        assert reading.error_ns < 50_000_000


def test_a_rank_alone_is_its_own_reference():
    assert read_all([time.perf_counter_ns])[0].offset_ns == 0
