"""What the search found: a plan with its estimate, how far from the best possible it is, and why others lost.

Models: all that a person wants to see of a plan. Ignores: names of parameters; the plan file has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pfeife_accelerate.ir import Schedule, StageCost, Timeline

__all__ = ["LowerBound", "Planned", "RankMemory", "RunnerUp"]


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A time that no plan of this graph on these ranks undercuts, and what proves it."""

    seconds: float
    kind: str  #: "work", "path" or "node"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's peak, in bytes, and what it consists of at that moment."""

    params_bytes: int
    state_bytes: int  #: gradients and optimizer state
    activation_bytes: int
    workspace_bytes: int
    limit_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it together."""
        return self.params_bytes + self.state_bytes + self.activation_bytes + self.workspace_bytes


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """The best plan of another family, and why it lost."""

    family: str
    estimate_s: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what the search knows of it."""

    cuts: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    schedule: Schedule  #: computations alone, every rank's list explicit
    recompute: tuple[int, ...]  #: stages that compute their activations again
    estimate_s: float
    lower_bound: LowerBound
    memory: tuple[RankMemory, ...]
    stages: tuple[StageCost, ...]
    runners_up: tuple[RunnerUp, ...]
    timeline: Timeline
