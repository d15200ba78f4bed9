"""Textbook step times."""

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import StageCost
from pfeife_accelerate.planner import MessageBytes, simulate
from pfeife_accelerate.schedule import (
    Message,
    backward_only,
    chain_messages,
    forward_only,
    gpipe,
    looped,
    lower,
    messages_between,
    one_f_one_b,
)

F, B = 1.0, 2.0


def run(schedule, stages, machine, *, size=0, messages=None):
    messages = chain_messages(schedule.stage_ranks) if messages is None else messages
    sizes = tuple(MessageBytes(forward_bytes=size, gradient_bytes=size) for _ in messages)
    return simulate(schedule, stages, messages, sizes, machine)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 9), (8, 16)])
def test_the_bubble_of_gpipe_and_1f1b_is_one_pass_over_the_other_ranks(even_stages, machine, ranks, microbatches):
    for schedule in (
        gpipe(num_ranks=ranks, num_microbatches=microbatches),
        one_f_one_b(num_ranks=ranks, num_microbatches=microbatches),
        one_f_one_b(num_ranks=ranks, num_microbatches=microbatches, prefetch_forwards=ranks - 1),
    ):
        timeline = run(schedule, even_stages(ranks), machine())
        assert timeline.makespan_s == pytest.approx((microbatches + ranks - 1) * (F + B))
        assert timeline.busy_s(0) == pytest.approx(microbatches * (F + B))


@pytest.mark.parametrize(("ranks", "microbatches", "loops"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_interleaving_divides_the_bubble_by_the_loops(even_stages, machine, ranks, microbatches, loops):
    schedule = looped(
        num_ranks=ranks,
        num_microbatches=microbatches,
        num_loops=loops,
        microbatches_per_loop=ranks,
        prefetch_forwards=ranks - 1,
    )
    timeline = run(schedule, even_stages(ranks * loops), machine())
    assert timeline.makespan_s == pytest.approx((microbatches * loops + ranks - 1) * (F + B))


def test_a_single_micro_batch_pays_every_transfer(even_stages, machine):
    timeline = run(gpipe(num_ranks=3, num_microbatches=1), even_stages(3), machine(bytes_per_s=2.0), size=1)
    assert timeline.makespan_s == pytest.approx(3 * (F + B) + 4 * 0.5)


def test_one_transfer_at_a_time_on_a_link(machine):
    # Rank 0 is done at 1, 2, 3; the link takes 2 for each: arrivals at 3, 5, 7.
    stages = (StageCost(forward_s=1.0, backward_s=0.0), StageCost(forward_s=1.0, backward_s=0.0))
    schedule = forward_only(gpipe(num_ranks=2, num_microbatches=3))
    timeline = run(schedule, stages, machine(latency_s=1.0, bytes_per_s=4.0), size=4)
    times = {str(i.action): (i.start_s, i.end_s) for i in timeline.intervals}
    assert [times[f"0SEND_F{m}>1@1"] for m in range(3)] == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0)]
    assert [times[f"1F{m}"] for m in range(3)] == [(3.0, 4.0), (5.0, 6.0), (7.0, 8.0)]


def test_the_two_directions_of_a_link_do_not_disturb_each_other(machine):
    stages = (StageCost(forward_s=1.0, backward_s=1.0), StageCost(forward_s=1.0, backward_s=1.0))
    timeline = run(one_f_one_b(num_ranks=2, num_microbatches=2), stages, machine(latency_s=2.0))
    times = {str(i.action): (i.start_s, i.end_s) for i in timeline.intervals}
    assert times["0SEND_F1>1@1"] == (3.0, 5.0)
    assert times["0SEND_B0>1@0"] == (5.0, 7.0)
    assert times["1F1"] == (5.0, 6.0)
    assert timeline.makespan_s == 10.0


def test_a_skip_is_not_relayed(even_stages, machine):
    """Stage 0 feeds stage 2 directly: its large value travels beside the chain, not through rank 1."""
    messages = (
        *chain_messages((0, 1, 2)),
        Message(producer_stage=0, consumer_rank=2, consumer_stages=(2,), has_grad=False),
    )
    sizes = tuple(MessageBytes(forward_bytes=n, gradient_bytes=0) for n in (1, 1, 5))
    schedule = forward_only(gpipe(num_ranks=3, num_microbatches=1))
    timeline = simulate(schedule, even_stages(3), messages, sizes, machine(bytes_per_s=1.0))
    assert timeline.makespan_s == pytest.approx(1 + 5 + 1)


def test_a_stage_does_not_wait_for_what_only_a_later_stage_of_its_rank_reads(even_stages, machine):
    """Stage 0 gives 1 byte to stage 1 and 10 to stage 3, both on rank 1; a byte takes a second."""
    values = ((0, (1,), True), (0, (3,), True), (1, (2,), True), (2, (3,), True))
    schedule = gpipe(num_ranks=2, num_microbatches=1, num_loops=2)
    messages = messages_between(values, schedule.stage_ranks)
    assert [(m.producer_stage, m.reader) for m in messages] == [(0, 1), (0, 3), (1, 2), (2, 3)]
    sizes = tuple(MessageBytes(forward_bytes=n, gradient_bytes=n) for n in (1, 10, 0, 0))
    for one in (schedule, lower(schedule, messages)):
        timeline = simulate(one, even_stages(4), messages, sizes, machine(bytes_per_s=1.0))
        times = {str(i.action): (i.start_s, i.end_s) for i in timeline.intervals}
        assert (times["0SEND_F0>1@1"], times["0SEND_F0>3@1"]) == ((1.0, 2.0), (2.0, 12.0))
        assert (times["1F0"], times["2F0"], times["3F0"]) == ((2.0, 3.0), (3.0, 4.0), (12.0, 13.0))
        # Each gradient leaves behind its own reader, that for the earlier stage first, and stage 0 waits for both.
        assert (times["0SEND_B0>3@0"], times["2SEND_B0>3@0"]) == ((15.0, 25.0), (25.0, 25.0))
        assert (times["1B0"], times["0SEND_B0>1@0"], times["0B0"]) == ((27.0, 29.0), (29.0, 30.0), (30.0, 32.0))


def test_what_two_stages_of_a_rank_read_travels_once_and_its_gradient_waits_for_both(even_stages, machine):
    values = ((0, (1, 3), True), (1, (2,), True), (2, (3,), True))
    schedule = gpipe(num_ranks=2, num_microbatches=1, num_loops=2)
    messages = messages_between(values, schedule.stage_ranks)
    sizes = tuple(MessageBytes(forward_bytes=n, gradient_bytes=n) for n in (5, 0, 0))
    timeline = simulate(schedule, even_stages(4), messages, sizes, machine(bytes_per_s=1.0))
    times = {str(i.action): (i.start_s, i.end_s) for i in timeline.intervals}
    sent = {name: when for name, when in times.items() if name.startswith("0SEND")}
    assert sent == {"0SEND_F0>1@1": (1.0, 6.0), "0SEND_B0>1@0": (15.0, 20.0)}
    assert (times["1F0"], times["3F0"], times["3B0"], times["1B0"]) == (
        (6.0, 7.0),
        (8.0, 9.0),
        (9.0, 11.0),
        (13.0, 15.0),
    )


def test_a_local_hand_over_takes_no_time(even_stages, machine):
    schedule = gpipe(num_ranks=1, num_microbatches=2, num_loops=3)
    timeline = run(schedule, even_stages(3), machine(latency_s=100.0))
    assert timeline.makespan_s == pytest.approx(2 * 3 * (F + B))


def test_a_lowered_schedule_takes_the_same_time(even_stages, machine):
    schedule = looped(num_ranks=2, num_microbatches=4, num_loops=2, microbatches_per_loop=2, prefetch_forwards=1)
    lowered = lower(schedule, chain_messages(schedule.stage_ranks))
    for half in (lambda s: s, forward_only, backward_only):
        link = machine(latency_s=0.3, bytes_per_s=3.0)
        assert run(half(schedule), even_stages(4), link, size=1) == run(
            lowered if half(schedule) == schedule else half(schedule), even_stages(4), link, size=1
        )


def test_prefetch_hides_transfers(even_stages, machine):
    times = [
        run(
            one_f_one_b(num_ranks=4, num_microbatches=12, prefetch_forwards=prefetch),
            even_stages(4),
            machine(latency_s=0.4),
        ).makespan_s
        for prefetch in (0, 3)
    ]
    assert times[1] < times[0]


def test_a_deadlock_has_no_time(even_stages, machine):
    schedule = looped(num_ranks=4, num_microbatches=5, num_loops=3, microbatches_per_loop=4, prefetch_forwards=3)
    with pytest.raises(PfeifeError, match="PF204 schedule deadlocks: it cannot be simulated"):
        run(schedule, even_stages(12), machine())
