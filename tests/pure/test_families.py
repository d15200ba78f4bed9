"""Schedules as pictures, and the properties all of them share."""

from dataclasses import replace
from itertools import product

import pytest

from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.ir import ActionKind, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.schedule import (
    Message,
    backward_only,
    build,
    build_for,
    chain_messages,
    families,
    forward_only,
    gpipe,
    is_executable,
    looped,
    lower,
    one_f_one_b,
    render,
)


def picture(text):
    """A drawn schedule without its margin."""
    rows = [row.strip() for row in text.strip().splitlines()]
    return "\n".join(f"rank {rank}  {row}" for rank, row in enumerate(rows))


def test_1f1b_two_ranks_three_microbatches():
    assert render(one_f_one_b(num_ranks=2, num_microbatches=3)) == picture("""
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpipe_d2_m3", gpipe(num_ranks=2, num_microbatches=3)),
        ("gpipe_d2_m2_v2", gpipe(num_ranks=2, num_microbatches=2, num_loops=2)),
        ("1f1b_d2_m4", one_f_one_b(num_ranks=2, num_microbatches=4)),
        ("1f1b_d2_m4_p1", one_f_one_b(num_ranks=2, num_microbatches=4, prefetch_forwards=1)),
        ("1f1b_d4_m4", one_f_one_b(num_ranks=4, num_microbatches=4)),
        ("1f1b_d2_m4", looped(num_ranks=2, num_microbatches=4, num_loops=1)),
        ("1f1b_d2_m4_p1", looped(num_ranks=2, num_microbatches=4, num_loops=1, prefetch_forwards=1)),
        ("looped_d2_m4_v2_l2", looped(num_ranks=2, num_microbatches=4, num_loops=2, microbatches_per_loop=2)),
        (
            "looped_d2_m4_v2_l2_p1",
            looped(num_ranks=2, num_microbatches=4, num_loops=2, microbatches_per_loop=2, prefetch_forwards=1),
        ),
        (
            "looped_d2_m4_v2_l4_p1",
            looped(num_ranks=2, num_microbatches=4, num_loops=2, microbatches_per_loop=4, prefetch_forwards=1),
        ),
    ],
)
def test_golden_pictures(golden, name, schedule):
    assert render(schedule) == golden(name)


def _grid():
    for ranks, microbatches, loops in product((1, 2, 3, 4), (1, 2, 4, 5, 6), (1, 2, 3)):
        for block in sorted({1, min(ranks, microbatches), microbatches}):
            for prefetch in sorted({0, 1, ranks - 1}):
                yield ranks, microbatches, loops, block, prefetch


def _skips(stage_ranks):
    """Every stage gives something to every set of later ones of a rank: the densest dependencies there are."""
    return tuple(
        Message(
            producer_stage=producer,
            consumer_rank=rank,
            consumer_stages=tuple(s for s in range(reader, len(stage_ranks)) if stage_ranks[s] == rank),
        )
        for producer in range(len(stage_ranks))
        for reader, rank in enumerate(stage_ranks)
        if reader > producer
    )


def test_every_accepted_schedule_lowers_to_a_valid_list_with_any_messages():
    accepted = 0
    for ranks, microbatches, loops, block, prefetch in _grid():
        schedule = looped(
            num_ranks=ranks,
            num_microbatches=microbatches,
            num_loops=loops,
            microbatches_per_loop=block,
            prefetch_forwards=prefetch,
        )
        chain = chain_messages(schedule.stage_ranks)
        if is_executable(schedule, chain):
            accepted += 1
            assert is_executable(schedule, _skips(schedule.stage_ranks))
            lower(schedule, chain)
            if ranks * loops <= 6:
                lower(schedule, _skips(schedule.stage_ranks))
        else:
            with pytest.raises(PfeifeError, match="PF204 schedule deadlocks"):
                lower(schedule, chain)
    assert accepted > 300


@pytest.mark.parametrize(("ranks", "loops"), [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_gpipe_and_its_halves_always_run(ranks, loops):
    for microbatches in (1, 3, 5):
        schedule = gpipe(num_ranks=ranks, num_microbatches=microbatches, num_loops=loops)
        for half in (schedule, forward_only(schedule), backward_only(schedule)):
            lower(half, _skips(schedule.stage_ranks))


@pytest.mark.parametrize("microbatches", [8, 16])
def test_megatrons_interleaved_order_runs_where_micro_batches_are_a_multiple_of_ranks(microbatches):
    schedule = looped(
        num_ranks=4, num_microbatches=microbatches, num_loops=2, microbatches_per_loop=4, prefetch_forwards=3
    )
    # Megatron's warm-up: twice the distance to the last rank, plus one block for each further loop.
    warm_up = [next(i for i, a in enumerate(actions) if a.kind.is_backward) - 1 for actions in schedule.per_rank]
    assert warm_up == [4 + 2 * (3 - rank) for rank in range(4)]
    assert is_executable(schedule, chain_messages(schedule.stage_ranks))


DEADLOCKS = [
    {"num_ranks": 4, "num_microbatches": 5, "num_loops": 3, "microbatches_per_loop": 4, "prefetch_forwards": 3},
    {"num_ranks": 8, "num_microbatches": 10, "num_loops": 2, "microbatches_per_loop": 8, "prefetch_forwards": 4},
    {"num_ranks": 8, "num_microbatches": 10, "num_loops": 2, "microbatches_per_loop": 8, "prefetch_forwards": 7},
]


@pytest.mark.parametrize("numbers", DEADLOCKS)
def test_sets_that_deadlock_are_refused(numbers):
    schedule = looped(**numbers)
    assert not is_executable(schedule, chain_messages(schedule.stage_ranks))
    with pytest.raises(PfeifeError, match="PF204"):
        lower(schedule, chain_messages(schedule.stage_ranks))


def test_less_prefetch_saves_the_second_set():
    schedule = looped(**{**DEADLOCKS[1], "prefetch_forwards": 3})
    assert is_executable(schedule, chain_messages(schedule.stage_ranks))


def test_forward_only_finishes_a_stage_before_the_next():
    schedule = forward_only(looped(num_ranks=2, num_microbatches=3, num_loops=2))
    assert render(schedule) == picture("""
        0F0 0F1 0F2 2F0 2F1 2F2
        1F0 1F1 1F2 3F0 3F1 3F2
    """)


def test_backward_only_runs_the_stages_in_reverse():
    schedule = backward_only(looped(num_ranks=2, num_microbatches=2, num_loops=2))
    assert render(schedule) == picture("""
        2B0 2B1 0B0 0B1
        3B0 3B1 1B0 1B1
    """)


def test_build_for_keeps_the_order_where_it_runs():
    spec = ScheduleSpec(family=ScheduleFamily.ONE_F_ONE_B, num_ranks=4, num_microbatches=8, prefetch_forwards=2)
    schedule = build_for(spec, 3)
    assert schedule.spec == replace(spec, num_microbatches=3)
    assert schedule == build(schedule.spec)


def test_build_for_a_batch_shorter_than_a_block_takes_one_block():
    spec = ScheduleSpec(
        family=ScheduleFamily.LOOPED, num_ranks=4, num_microbatches=8, num_loops=2, microbatches_per_loop=4
    )
    schedule = build_for(spec, 3)
    assert (schedule.spec.family, schedule.spec.microbatches_per_loop) == (ScheduleFamily.LOOPED, 3)


def test_build_for_an_unlucky_number_takes_an_order_that_runs():
    numbers = DEADLOCKS[0]
    spec = ScheduleSpec(family=ScheduleFamily.LOOPED, **{**numbers, "num_microbatches": 8})
    schedule = build_for(spec, 5)
    assert schedule.spec.microbatches_per_loop == 5
    lower(schedule, chain_messages(schedule.stage_ranks))


def test_build_for_always_finds_an_order_for_the_same_stages():
    for ranks, loops, prefetch in product((2, 4, 8), (1, 2, 3), (0, 1, 7)):
        spec = ScheduleSpec(
            family=ScheduleFamily.LOOPED,
            num_ranks=ranks,
            num_microbatches=ranks * 2,
            num_loops=loops,
            prefetch_forwards=prefetch,
        )
        for microbatches in (1, 3, ranks + 1, ranks * 2 - 1):
            schedule = build_for(spec, microbatches)
            assert schedule.num_stages == ranks * loops
            assert schedule.num_microbatches == microbatches
            forwards = [a for actions in schedule.per_rank for a in actions if a.kind is ActionKind.FORWARD]
            assert len(forwards) == ranks * loops * microbatches


def test_no_order_at_all_is_a_fault_of_the_package(monkeypatch):
    monkeypatch.setattr(families, "is_executable", lambda *_: False)
    with pytest.raises(InternalError, match="PF209 no order for 3 micro-batches"):
        build_for(ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=2, num_microbatches=2), 3)


def test_build_for_nothing_is_refused():
    with pytest.raises(PfeifeError, match="PF210"):
        build_for(ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=2, num_microbatches=2), 0)
