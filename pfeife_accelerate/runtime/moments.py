"""Moments of a rank: marks that cost next to nothing when they are made, and become nanoseconds afterwards.

Models: the host's clock for a device that computes when it is told; events in the device's own stream for one that
runs ahead of the host, tied to the host's clock by one event that both know.
Ignores: other ranks' clocks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, TypeAlias, final

import torch

__all__ = ["DeviceMoments", "HostMoments", "Mark", "Moments", "moments_of"]

#: Nanoseconds of the host, or an event of the device.
Mark: TypeAlias = Any


class Moments(ABC):
    """Makes marks and reads them."""

    @abstractmethod
    def now(self) -> Mark:
        """A mark of what the device has been told so far."""

    @abstractmethod
    def read_ns(self, mark: Mark) -> int:
        """When a mark was reached, by the host's clock. May wait for the device."""


@final
class HostMoments(Moments):
    """By the host's clock."""

    def now(self) -> Mark:
        """The host's time."""
        return time.perf_counter_ns()

    def read_ns(self, mark: Mark) -> int:
        """The mark itself."""
        nanoseconds: int = mark
        return nanoseconds


@final
class DeviceMoments(Moments):
    """By events in the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Wait for the device once, to learn what its events mean."""
        self._device = device
        self._base = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            self._base.record()
            self._base.synchronize()
        self._base_ns = time.perf_counter_ns()

    def now(self) -> Mark:
        """An event behind all that is in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read_ns(self, mark: Mark) -> int:
        """The host's time when the device came to the event; marks of the host are what they are."""
        if isinstance(mark, int):
            return mark
        mark.synchronize()
        return self._base_ns + round(self._base.elapsed_time(mark) * 1e6)


def moments_of(device: torch.device) -> Moments:
    """How moments on a device are told."""
    return DeviceMoments(device) if device.type == "cuda" else HostMoments()
