"""The orders we know, as pure generators of compute-only schedules.

Models: gpipe, 1F1B with prefetch, and the looped order of the Pfeife paper. Stage s lives on rank s mod D.
Ignores: transfers (`lowering` adds them), time, and whether an order can run at all (`validate` proves that).

Legend: D ranks, M micro-batches, v loops, L micro-batches per loop, P prefetched forwards; r is a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pfeife_accelerate.errors import InternalError, PfeifeError, assert_never
from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.schedule.messages import chain_messages
from pfeife_accelerate.schedule.validate import is_executable

__all__ = ["backward_only", "build", "build_for", "forward_only", "gpipe", "looped", "one_f_one_b"]

Actions = tuple[Action, ...]


def build(spec: ScheduleSpec) -> Schedule:
    """The schedule that `spec` describes; it may still deadlock, see `is_executable`."""
    match spec.family:
        case ScheduleFamily.GPIPE:
            # One block of all micro-batches, and no backward before the last forward.
            per_rank = tuple(
                _forwards(spec, r, spec.num_microbatches) + _backwards(spec, r, spec.num_microbatches)
                for r in range(spec.num_ranks)
            )
        case ScheduleFamily.ONE_F_ONE_B:
            per_rank = tuple(_looped_rank(spec, r, spec.num_microbatches) for r in range(spec.num_ranks))
        case ScheduleFamily.LOOPED:
            per_rank = tuple(_looped_rank(spec, r, spec.block) for r in range(spec.num_ranks))
        case _:
            assert_never(spec.family)
    stage_ranks = tuple(stage % spec.num_ranks for stage in range(spec.num_stages))
    return Schedule(spec=spec, per_rank=per_rank, stage_ranks=stage_ranks)


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


def _blocks(spec: ScheduleSpec, block: int) -> Iterator[range]:
    for first in range(0, spec.num_microbatches, block):
        yield range(first, min(first + block, spec.num_microbatches))


def _owned(spec: ScheduleSpec, rank: int) -> range:
    return range(rank, spec.num_stages, spec.num_ranks)


def _forwards(spec: ScheduleSpec, rank: int, block: int) -> Actions:
    return tuple(
        Action(kind=ActionKind.FORWARD, stage=stage, microbatch=microbatch)
        for microbatches in _blocks(spec, block)
        for stage in _owned(spec, rank)
        for microbatch in microbatches
    )


def _backwards(spec: ScheduleSpec, rank: int, block: int) -> Actions:
    return tuple(
        Action(kind=ActionKind.BACKWARD, stage=stage, microbatch=microbatch)
        for microbatches in _blocks(spec, block)
        for stage in reversed(_owned(spec, rank))
        for microbatch in microbatches
    )


def _looped_rank(spec: ScheduleSpec, rank: int, block: int) -> Actions:
    """Rank r's order: W_r - 1 forwards, then (forward, backward) while forwards last, then backwards.

    W_r = (v-1)·L + (D-r) + min(D-r-1, P); with one loop L does not matter. D=2 M=4 v=1 P=0, where W = 2, 1:

        rank 0  0F0 | 0F1 0B0  0F2 0B1  0F3 0B2 | 0B3
        rank 1      | 1F0 1B0  1F1 1B1  1F2 1B2  1F3 1B3 |
    """
    forwards, backwards = _forwards(spec, rank, block), _backwards(spec, rank, block)
    later_ranks = spec.num_ranks - rank - 1
    warm_up = (spec.num_loops - 1) * block + later_ranks + min(later_ranks, spec.prefetch_forwards)
    warm_up = min(warm_up, len(forwards))
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return (*order, *backwards[len(forwards) - warm_up :])


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
