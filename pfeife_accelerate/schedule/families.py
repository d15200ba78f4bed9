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

__all__ = ["backward_only", "build", "build_for", "forward_only", "gpipe", "looped", "numbered", "one_f_one_b"]


def build(spec: ScheduleSpec) -> Schedule:
    """The schedule that `spec` describes; it may still deadlock, see `is_executable`."""
    return schedule_of(numbered(spec), spec)


def numbered(spec: ScheduleSpec) -> Order:
    """The same with numbers for jobs, as the planner compares them."""
    match spec.family:
        case ScheduleFamily.GPIPE:
            # One block of all micro-batches, and no backward before the last forward.
            number = spec.num_microbatches
            jobs = [np.concatenate((_forwards(spec, r, number), _backwards(spec, r, number))) for r in _ranks(spec)]
        case ScheduleFamily.ONE_F_ONE_B:
            jobs = [_looped_rank(spec, r, spec.num_microbatches, spec.prefetch_forwards) for r in _ranks(spec)]
        case ScheduleFamily.LOOPED:
            jobs = [_looped_rank(spec, r, spec.block, spec.prefetch_forwards) for r in _ranks(spec)]
        case ScheduleFamily.INTERLEAVED:
            jobs = [_looped_rank(spec, r, spec.block, spec.num_ranks - 1) for r in _ranks(spec)]
        case ScheduleFamily.WAVE | ScheduleFamily.ZB_H1 | ScheduleFamily.ZB_V:
            return unit_order(spec)
        case ScheduleFamily.LIST:
            raise InternalError(id="PF213", what="an order made by list scheduling follows from no numbers")
        case _:
            assert_never(spec.family)
    return Order(jobs=tuple(jobs), stage_ranks=spec.stage_ranks, num_microbatches=spec.num_microbatches)


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


def _ranks(spec: ScheduleSpec) -> range:
    return range(spec.num_ranks)


def _in_blocks(spec: ScheduleSpec, stages: Sequence[int], block: int) -> Jobs:
    """For each block of micro-batches, for each of the stages, all of the block."""
    number = spec.num_microbatches
    first = np.asarray(stages, dtype=np.int64)[:, None] * number
    blocks = [np.arange(start, min(start + block, number)) for start in range(0, number, block)]
    return np.concatenate([(first + microbatches).ravel() for microbatches in blocks])


def _forwards(spec: ScheduleSpec, rank: int, block: int) -> Jobs:
    return _in_blocks(spec, range(rank, spec.num_stages, spec.num_ranks), block)


def _backwards(spec: ScheduleSpec, rank: int, block: int) -> Jobs:
    owned = reversed(range(rank, spec.num_stages, spec.num_ranks))
    return _in_blocks(spec, tuple(owned), block) + spec.num_stages * spec.num_microbatches


def _looped_rank(spec: ScheduleSpec, rank: int, block: int, prefetch: int) -> Jobs:
    """Rank r's order: W_r - 1 forwards, then (forward, backward) while forwards last, then backwards.

    W_r = (v-1)·L + (D-r) + min(D-r-1, P); with one loop L does not matter. D=2 M=4 v=1 P=0, where W = 2, 1:

        rank 0  0F0 | 0F1 0B0  0F2 0B1  0F3 0B2 | 0B3
        rank 1      | 1F0 1B0  1F1 1B1  1F2 1B2  1F3 1B3 |
    """
    forwards, backwards = _forwards(spec, rank, block), _backwards(spec, rank, block)
    later_ranks = spec.num_ranks - rank - 1
    warm_up = min((spec.num_loops - 1) * block + later_ranks + min(later_ranks, prefetch), len(forwards))
    pairs = np.stack((forwards[warm_up:], backwards[: len(forwards) - warm_up]), axis=1)
    return np.concatenate((forwards[:warm_up], pairs.ravel(), backwards[len(forwards) - warm_up :]))


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
