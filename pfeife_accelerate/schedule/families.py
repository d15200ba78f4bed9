"""The orders we know, as pure generators of compute-only schedules.

Models: gpipe, 1F1B with prefetch, the looped order of the Pfeife paper, Megatron-LM's interleaved one; and those that a
scheduler finds where all jobs last equally long: waves, zero bubble (Qi et al., 2023).
Ignores: transfers (`lowering` adds them), time, and whether an order can run at all (`validate` proves that).

Legend: D ranks, M micro-batches, v loops, L micro-batches per loop, P prefetched forwards; r is a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pfeife_accelerate.errors import InternalError, PfeifeError, assert_never
from pfeife_accelerate.ir.actions import ActionKind, Schedule, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.schedule.messages import chain_messages
from pfeife_accelerate.schedule.order import Jobs, Order, schedule_of
from pfeife_accelerate.schedule.unit_orders import unit_order
from pfeife_accelerate.schedule.validate import is_executable

__all__ = [
    "backward_only", "build", "build_for", "forward_only", "gpipe", "looped", "looped_order", "numbered", "one_f_one_b",
]  # fmt: skip


def build(spec: ScheduleSpec) -> Schedule:
    """The schedule that `spec` describes; it may still deadlock, see `is_executable`."""
    return schedule_of(numbered(spec), spec)


def numbered(spec: ScheduleSpec) -> Order:
    """The same with numbers for jobs, as the planner compares them."""
    number = spec.num_microbatches
    match spec.family:
        case ScheduleFamily.GPIPE:
            # One block of all micro-batches, and no backward before the last forward.
            return looped_order(spec.stage_ranks, number, block=number, warm_up=spec.num_stages * number)
        case ScheduleFamily.ONE_F_ONE_B:
            return looped_order(spec.stage_ranks, number, block=number, prefetch=spec.prefetch_forwards)
        case ScheduleFamily.LOOPED:
            return looped_order(spec.stage_ranks, number, block=spec.block, prefetch=spec.prefetch_forwards)
        case ScheduleFamily.INTERLEAVED:
            return looped_order(spec.stage_ranks, number, block=spec.block, prefetch=spec.num_ranks - 1)
        case ScheduleFamily.WAVE | ScheduleFamily.ZB_H1 | ScheduleFamily.ZB_V:
            return unit_order(spec)
        case ScheduleFamily.LIST:
            raise InternalError(id="PF213", what="an order made by list scheduling follows from no numbers")
        case _:
            assert_never(spec.family)


def looped_order(
    stage_ranks: Sequence[int],
    num_microbatches: int,
    *,
    block: int,
    prefetch: int = 0,
    warm_up: int | None = None,
    most_alive: int | None = None,
) -> Order:
    """W_r - 1 forwards, then (forward, backward) while forwards last, then backwards; stages go round the ranks.

    W_r = (n-1)·L + k + min(k-1, P), where rank r owns n stages and the last of them is the k-th from the end; where the
    stages are v rounds of D ranks, n = v and k = D-r. With one stage a rank L does not matter. `warm_up` gives W_r - 1
    instead; `most_alive` is the most that W_r may be, for one stage a rank. D=2 M=4 v=1 P=0, where W = 2, 1:

        rank 0  0F0 | 0F1 0B0  0F2 0B1  0F3 0B2 | 0B3
        rank 1      | 1F0 1B0  1F1 1B1  1F2 1B2  1F3 1B3 |
    """
    jobs = []
    for rank in range(max(stage_ranks) + 1):
        owned = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
        from_end = len(stage_ranks) - owned[-1]
        forwards = _in_blocks(owned, num_microbatches, block)
        backwards = _in_blocks(owned[::-1], num_microbatches, block) + len(stage_ranks) * num_microbatches
        first = (len(owned) - 1) * block + from_end - 1 + min(from_end - 1, prefetch) if warm_up is None else warm_up
        first = min(first, len(forwards), len(forwards) if most_alive is None else most_alive - 1)
        pairs = np.stack((forwards[first:], backwards[: len(forwards) - first]), axis=1)
        jobs.append(np.concatenate((forwards[:first], pairs.ravel(), backwards[len(forwards) - first :])))
    return Order(jobs=tuple(jobs), stage_ranks=tuple(stage_ranks), num_microbatches=num_microbatches)


def gpipe(*, num_ranks: int, num_microbatches: int, num_loops: int = 1) -> Schedule:
    """All forwards in stage order, then all backwards in reverse stage order (breadth-first where looped)."""
    return build(
        ScheduleSpec(
            family=ScheduleFamily.GPIPE,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_loops=num_loops,
        )
    )


def one_f_one_b(*, num_ranks: int, num_microbatches: int, prefetch_forwards: int = 0) -> Schedule:
    """One forward, one backward, after a warm-up that `prefetch_forwards` lengthens where it can."""
    return build(
        ScheduleSpec(
            family=ScheduleFamily.ONE_F_ONE_B,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            prefetch_forwards=prefetch_forwards,
        )
    )


def looped(
    *,
    num_ranks: int,
    num_microbatches: int,
    num_loops: int,
    microbatches_per_loop: int | None = None,
    prefetch_forwards: int = 0,
) -> Schedule:
    """Several stages per rank, blocks of micro-batches looping over the ranks."""
    return build(
        ScheduleSpec(
            family=ScheduleFamily.LOOPED,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_loops=num_loops,
            microbatches_per_loop=microbatches_per_loop,
            prefetch_forwards=prefetch_forwards,
        )
    )


def _in_blocks(stages: Sequence[int], num_microbatches: int, block: int) -> Jobs:
    """For each block of micro-batches, for each of the stages, all of the block."""
    first = np.asarray(stages, dtype=np.int64)[:, None] * num_microbatches
    starts = range(0, num_microbatches, block)
    blocks = [np.arange(start, min(start + block, num_microbatches)) for start in starts]
    return np.concatenate([(first + microbatches).ravel() for microbatches in blocks])


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards alone, all micro-batches of a stage before the rank's next stage.

    All of stage 0, then all of stage 1, and so on, respects every dependency and every rank's list, wherever the stages
    live: it cannot deadlock.
    """
    return replace(
        schedule,
        per_rank=tuple(
            tuple(sorted((a for a in actions if a.kind is ActionKind.FORWARD), key=lambda a: a.stage))
            for actions in schedule.per_rank
        ),
    )


def backward_only(schedule: Schedule) -> Schedule:
    """The backwards alone, all micro-batches of a stage before the rank's previous stage; it cannot deadlock either."""
    return replace(
        schedule,
        per_rank=tuple(
            tuple(sorted((a for a in actions if a.kind.is_backward), key=lambda a: -a.stage))
            for actions in schedule.per_rank
        ),
    )


def build_for(spec: ScheduleSpec, num_microbatches: int) -> Schedule:
    """The order for another number of micro-batches, as the short last batch of an epoch needs it.

    Stages and ranks stay. Where the order would deadlock (or its block exceeds the batch), one block of all
    micro-batches is tried, then gpipe, which always runs.
    """
    for candidate in _fallbacks(spec, num_microbatches):
        schedule = build(candidate)
        # A chain implies every dependency that goes forward over the stages: what passes here passes with any skips.
        if is_executable(schedule, chain_messages(schedule.stage_ranks)):
            return schedule
    raise InternalError(id="PF209", what=f"no order for {num_microbatches} micro-batches", where=str(spec))


def _fallbacks(spec: ScheduleSpec, num_microbatches: int) -> Iterator[ScheduleSpec]:
    try:
        yield replace(spec, num_microbatches=num_microbatches)
    except PfeifeError:
        if num_microbatches < 1:  # no other order helps
            raise
    yield replace(
        spec,
        family=ScheduleFamily.LOOPED,
        num_microbatches=num_microbatches,
        microbatches_per_loop=num_microbatches,
    )
    yield ScheduleSpec(
        family=ScheduleFamily.GPIPE,
        num_ranks=spec.num_ranks,
        num_microbatches=num_microbatches,
        num_loops=spec.num_loops,
    )
