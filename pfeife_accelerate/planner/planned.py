"""What the search gives: a plan with all that it knows about it.

Models: where to cut, who runs what when, what that should take, how far that is from the best possible, and what the
other families would have taken. Ignores: names of operations and parameters, which a cost graph does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from pfeife_accelerate.ir import Schedule, StageCost, Timeline
from pfeife_accelerate.planner.bound import LowerBound
from pfeife_accelerate.planner.memory import RankMemory

__all__ = ["Planned", "RunnerUp"]


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """The best plan of another family; `estimate_s` is None where none of it fits or runs."""

    family: str
    estimate_s: float | None
    why: str  #: it lost, in one line


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan that has been executed in simulated time, action by action, as ranks will execute it."""

    graph_fingerprint: str
    num_operations: int
    cuts: tuple[int, ...]
    schedule: Schedule
    recompute: tuple[int, ...]  #: stages that compute their activations again
    stages: tuple[StageCost, ...]
    estimate_s: float
    lower_bound: LowerBound
    memory: tuple[RankMemory, ...]
    timeline: Timeline
    runners_up: tuple[RunnerUp, ...]

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.schedule.stage_ranks

    @property
    def lower_bound_s(self) -> float:
        """No plan is faster."""
        return self.lower_bound.seconds

    @property
    def gap(self) -> float:
        """How far the estimate is above the bound, as a share of it."""
        return self.lower_bound.gap(self.estimate_s)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of each rank."""
        return tuple(memory.peak_bytes for memory in self.memory)
