"""Orders for other numbers of micro-batches, and for one direction alone, on any placement."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import Schedule, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.schedule import (
    Message,
    backward_only,
    build,
    chain_messages,
    for_microbatches,
    forward_only,
    in_sequence,
    looped,
    lower,
    one_f_one_b,
    render,
)
from tests.orders import random_order, random_placement

V_SHAPE = (0, 1, 1, 0)


def _schedule(stage_ranks, num_microbatches, per_rank):
    spec = ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=max(stage_ranks) + 1, num_microbatches=num_microbatches)
    return Schedule.parse(spec, per_rank, stage_ranks)


def _random(seed):
    chance = random.Random(seed)
    num_ranks = chance.randint(1, 4)
    stage_ranks = random_placement(num_ranks, num_ranks + chance.randint(0, 6), seed)
    num_microbatches = chance.randint(1, 6)
    per_rank = random_order(stage_ranks, num_microbatches, seed)
    return _schedule(stage_ranks, num_microbatches, per_rank)


def _with_skips(stage_ranks, seed):
    """The chain and random skip connections, some without a gradient."""
    chance = random.Random(seed)
    readers = {stage: {stage + 1} for stage in range(len(stage_ranks) - 1)}
    for stage in readers:
        readers[stage] |= {later for later in range(stage + 1, len(stage_ranks)) if chance.random() < 0.3}
    messages = []
    for stage, stages in readers.items():
        for first in sorted(stages):
            rank = stage_ranks[first]
            later = [s for s in stages if s > first and stage_ranks[s] == rank and chance.random() < 0.7]
            has_grad = first == stage + 1 or chance.random() < 0.7
            messages.append(
                Message(
                    producer_stage=stage,
                    consumer_rank=rank,
                    consumer_stages=(first, *sorted(later)),
                    has_grad=has_grad,
                )
            )
    return tuple(messages)


def _computes(schedule):
    return Counter(str(a) for actions in schedule.per_rank for a in actions if a.kind.is_compute)


def test_any_order_gives_orders_for_any_number_and_for_each_direction_that_run():
    for seed in range(150):
        schedule = _random(seed)
        messages = _with_skips(schedule.stage_ranks, seed)
        lower(schedule, messages)
        for number in (1, 2, 3, 5, 8, 13):
            other = for_microbatches(schedule, number)
            assert other.num_microbatches == number and other.stage_ranks == schedule.stage_ranks
            both = _computes(lower(other, messages))
            forwards, backwards = (_computes(lower(f(other), messages)) for f in (forward_only, backward_only))
            assert forwards + backwards == both
            assert both == {f"{s}{k}{m}": 1 for s in range(other.num_stages) for k in "FB" for m in range(number)}


def test_fewer_micro_batches_keep_the_order_of_the_others():
    per_rank = (("0F0", "0F1", "0F2", "3F1", "3B1", "3F0", "3B0", "0B1", "3F2", "3B2", "0B0", "0B2"),
                ("1F1", "2F1", "1F0", "2F0", "1F2", "2B1", "1B1", "2F2", "2B0", "1B0", "2B2", "1B2"))  # fmt: skip
    schedule = for_microbatches(_schedule(V_SHAPE, 3, per_rank), 2)
    assert render(schedule).splitlines() == [
        "rank 0  0F0 0F1 3F1 3B1 3F0 3B0 0B1 0B0",
        "rank 1  1F1 2F1 1F0 2F0 2B1 1B1 2B0 1B0",
    ]


def test_more_micro_batches_repeat_an_order_of_no_family():
    per_rank = (("0F1", "0F0", "0B1", "0B0"), ("1F1", "1F0", "1B1", "1B0"))
    schedule = for_microbatches(_schedule((0, 1), 2, per_rank), 5)
    assert render(schedule).splitlines() == [
        "rank 0  0F1 0F0 0B1 0B0 0F3 0F2 0B3 0B2 0F4 0B4",
        "rank 1  1F1 1F0 1B1 1B0 1F3 1F2 1B3 1B2 1F4 1B4",
    ]


def test_more_micro_batches_of_a_family_are_generated():
    small = one_f_one_b(num_ranks=3, num_microbatches=4, prefetch_forwards=1)
    assert for_microbatches(small, 9) == one_f_one_b(num_ranks=3, num_microbatches=9, prefetch_forwards=1)


def test_the_numbers_of_a_block_fit_a_short_batch():
    schedule = for_microbatches(looped(num_ranks=2, num_microbatches=8, num_loops=2, microbatches_per_loop=4), 3)
    assert (schedule.spec.num_microbatches, schedule.spec.microbatches_per_loop) == (3, 3)
    lower(schedule, chain_messages(schedule.stage_ranks))


def test_the_same_number_is_the_same_order():
    schedule = _random(3)
    assert for_microbatches(schedule, schedule.num_microbatches) is schedule


def test_micro_batches_can_always_be_taken_in_sequence():
    for seed in range(100):
        schedule = _random(seed)
        sequence = in_sequence(schedule)
        lower(sequence, _with_skips(schedule.stage_ranks, seed))
        for before, after in zip(schedule.per_rank, sequence.per_rank, strict=True):
            assert [(a.kind, a.stage) for a in before] == [(a.kind, a.stage) for a in after]
            for stage in range(schedule.num_stages):
                for kind in "FB":
                    numbers = [a.microbatch for a in after if (a.stage, a.kind.value) == (stage, kind)]
                    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("number", [0, -1])
def test_no_micro_batches_are_refused(number):
    with pytest.raises(PfeifeError, match="PF210 impossible schedule: num_microbatches="):
        for_microbatches(build(replace(_random(1).spec)), number)
