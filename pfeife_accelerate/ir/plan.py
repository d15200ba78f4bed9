"""The result of planning: which rank runs which operations in which order, and what that should cost.

Models: everything a rank needs to take its part, as plain data that survives JSON. Ignores: how it was found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.actions import Schedule, ScheduleSpec
from pfeife_accelerate.ir.costs import StageCost
from pfeife_accelerate.ir.machine import Machine
from pfeife_accelerate.ir.tensors import TensorSpec

__all__ = ["Edge", "PipelinePlan", "Slicing", "StageSpec"]


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Cut positions, strictly increasing; a cut p lies directly before operation p."""

    cuts: tuple[int, ...]

    def ranges(self, num_ops: int) -> tuple[tuple[int, int], ...]:
        """(first, one past the last) operation of each stage."""
        bounds = (0, *self.cuts, num_ops)
        return tuple(pairwise(bounds))


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage: its operations `[first, last)`, the parameters it reads, its cost per micro-batch."""

    op_range: tuple[int, int]
    params: tuple[str, ...]
    cost: StageCost


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One tensor that leaves its stage. An operation with several tensors has one edge each, called `name.0`, ..."""

    producer: int
    consumers: tuple[int, ...]
    value: str
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A whole plan; `graph_fingerprint` says for which graph.

    To another program it says all with `cuts`, `stage_ranks` (the rank of each stage), `per_rank` (the computations of
    each rank in their order, such as `2F0`) and `recompute` (the stages that compute their activations again).
    """

    VERSION: ClassVar[int] = 2

    version: int = 2
    graph_fingerprint: str
    cuts: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    per_rank: tuple[tuple[str, ...], ...]
    recompute: tuple[int, ...] = ()
    estimate_s: float
    lower_bound_s: float = 0.0  #: no order of this graph on these ranks is faster; 0 where nothing is known
    peak_bytes: tuple[int, ...]  #: per rank
    spec: ScheduleSpec  #: where the order comes from
    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]
    machine: Machine | None = None  #: that it was made for; without it, links are taken to cost nothing
    copied_values: tuple[str, ...] = ()  #: operations whose value each reading stage computes anew: it is not sent

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        num_stages, num_ranks = len(self.stage_ranks), len(self.per_rank)
        problems = (
            (len(self.cuts) + 1 != num_stages, f"{len(self.cuts)} cuts for {num_stages} stage_ranks"),
            (len(self.stages) != num_stages, f"{len(self.stages)} stages for {num_stages} stage_ranks"),
            (len(self.peak_bytes) != num_ranks, f"{len(self.peak_bytes)} peak_bytes for {num_ranks} ranks"),
            (self.spec.num_ranks != num_ranks, f"orders of {num_ranks} ranks, and a spec for {self.spec.num_ranks}"),
            (not set(self.stage_ranks) <= set(range(num_ranks)), f"stage_ranks {self.stage_ranks}, {num_ranks} ranks"),
            (not set(self.recompute) <= set(range(num_stages)), f"recompute {self.recompute}, {num_stages} stages"),
        )
        for is_wrong, what in problems:
            if is_wrong:
                raise PfeifeError(id="PF167", what=f"the parts of the plan do not fit together: {what}")

    @cached_property
    def schedule(self) -> Schedule:
        """The order as actions."""
        return Schedule.parse(self.spec, self.per_rank, self.stage_ranks)

    def with_swapped(self, rank: int, other: int) -> PipelinePlan:
        """The same plan with two ranks in each other's place."""
        place = list(range(self.num_ranks))
        place[rank], place[other] = other, rank
        return replace(
            self,
            stage_ranks=tuple(place[owner] for owner in self.stage_ranks),
            per_rank=tuple(self.per_rank[place[r]] for r in range(self.num_ranks)),
            peak_bytes=tuple(self.peak_bytes[place[r]] for r in range(self.num_ranks)),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline, those without a stage included."""
        return len(self.per_rank)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def loss_rank(self) -> int:
        """The rank of the last stage, which computes the loss."""
        return self.stage_ranks[-1]
