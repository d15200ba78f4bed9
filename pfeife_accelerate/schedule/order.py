"""Orders as numbers: what the planner compares by the thousand, before one of them becomes a schedule.

Models: a job is (kind * stages + stage) * micro-batches + micro-batch; kinds are 0 forward, 1 backward (or its input
half), 2 weight gradient. Ignores: transfers and time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule, ScheduleSpec

__all__ = ["Jobs", "Order", "order_of", "schedule_of", "split_backwards"]

Jobs: TypeAlias = npt.NDArray[np.int64]

_WHOLE = (ActionKind.FORWARD, ActionKind.BACKWARD)
_HALVES = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The jobs of every rank in their order, and where each stage lives. An order equals itself alone."""

    jobs: tuple[Jobs, ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    is_split: bool = False  #: whether backwards come in halves

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.jobs)

    @property
    def num_kinds(self) -> int:
        """Kinds of job that each stage and micro-batch has."""
        return 3 if self.is_split else 2

    @property
    def num_jobs(self) -> int:
        """Jobs of all ranks."""
        return self.num_kinds * self.num_stages * self.num_microbatches


def order_of(schedule: Schedule) -> Order:
    """The compute actions of a schedule of whole steps as numbers."""
    number, stages = schedule.num_microbatches, schedule.num_stages
    compute = [[action for action in actions if action.kind.is_compute] for actions in schedule.per_rank]
    is_split = any(action.kind is ActionKind.WEIGHT_GRADIENT for actions in compute for action in actions)
    first = {kind: index * stages for index, kind in enumerate(_HALVES if is_split else _WHOLE)}
    jobs = tuple(
        np.asarray([(first[a.kind] + a.stage) * number + a.microbatch for a in actions], dtype=np.int64)
        for actions in compute
    )
    return Order(jobs=jobs, stage_ranks=schedule.stage_ranks, num_microbatches=number, is_split=is_split)


def schedule_of(order: Order, spec: ScheduleSpec) -> Schedule:
    """An order as a compute-only schedule; `spec` says where it comes from."""
    kinds = _HALVES if order.is_split else _WHOLE
    per_rank = []
    for jobs in order.jobs:
        row, microbatch = np.divmod(jobs, order.num_microbatches)
        kind, stage = np.divmod(row, order.num_stages)
        per_rank.append(
            tuple(
                Action(kind=kinds[k], stage=s, microbatch=m)
                for k, s, m in zip(kind.tolist(), stage.tolist(), microbatch.tolist(), strict=True)
            )
        )
    return Schedule(spec=spec, per_rank=tuple(per_rank), stage_ranks=order.stage_ranks)


def split_backwards(order: Order) -> Order:
    """The same order with each backward as its two halves, one behind the other."""
    step = order.num_stages * order.num_microbatches
    jobs = []
    for rank_jobs in order.jobs:
        backward = rank_jobs >= step
        halves = np.repeat(rank_jobs, 1 + backward)
        second = np.cumsum(1 + backward)[backward] - 1
        halves[second] += step
        jobs.append(halves)
    return Order(
        jobs=tuple(jobs), stage_ranks=order.stage_ranks, num_microbatches=order.num_microbatches, is_split=True
    )
