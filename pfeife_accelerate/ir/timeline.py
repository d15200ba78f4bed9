"""When each action ran, simulated or recorded, and how much memory that took.

Models: one interval per compute action and one per transfer (under its SEND, on the sending rank).
Ignores: what happens inside an action.
"""

from __future__ import annotations

from dataclasses import dataclass

from pfeife_accelerate.ir.actions import Action

__all__ = ["Interval", "MemoryCurve", "Timeline"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One action of one rank, in seconds since the start of the step."""

    action: Action
    rank: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All intervals of a step; `critical_path` is the chain that decides its length, where known."""

    intervals: tuple[Interval, ...]
    critical_path: tuple[Interval, ...] = ()

    @property
    def makespan_s(self) -> float:
        """End of the last interval, in seconds."""
        return max((interval.end_s for interval in self.intervals), default=0.0)

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(i.duration_s for i in self.intervals if i.rank == rank and i.action.kind.is_compute)


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """The highest memory use of each rank, in bytes, and its part that never changes."""

    peak_bytes: tuple[int, ...]
    static_bytes: tuple[int, ...]
