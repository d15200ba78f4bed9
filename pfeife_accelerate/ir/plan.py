"""The result of planning: which rank runs which operations in which order, and what that should cost.

Models: everything a rank needs to take its part, as plain data that survives JSON. Ignores: how it was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from pfeife_accelerate.ir.actions import ScheduleSpec
from pfeife_accelerate.ir.costs import StageCost
from pfeife_accelerate.ir.tensors import TensorSpec

__all__ = ["Edge", "Estimate", "PipelinePlan", "Slicing", "StageSpec"]


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
    """One stage: its rank, its operations `[first, last)`, the parameters it reads, its cost per micro-batch."""

    index: int
    rank: int
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
class Estimate:
    """What the simulator expects of one step."""

    step_s: float
    peak_bytes: tuple[int, ...]  #: per rank


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A whole plan; `graph_fingerprint` says for which graph."""

    VERSION: ClassVar[int] = 1

    version: int = 1
    graph_fingerprint: str
    slicing: Slicing
    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]
    spec: ScheduleSpec
    estimate: Estimate

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(stage.rank for stage in self.stages)
