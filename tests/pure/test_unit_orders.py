"""Waves, zero bubble, list scheduling: complete, possible, within their room, as short as they are known to be."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.planner import Problem, SearchOptions
from pfeife_accelerate.planner.event_graph import EventGraph
from pfeife_accelerate.planner.memory import MemoryProfile
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.schedule import Message, build, chain_messages, is_executable, looped, lower, unit_orders
from pfeife_accelerate.schedule.families import numbered
from pfeife_accelerate.schedule.listing import JobGraph, Listing, Room, list_schedule
from pfeife_accelerate.schedule.order import order_of, schedule_of, split_backwards
from tests.cost_graphs import chain, machine, node

SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 5) for microbatches in (1, 2, 3, 4, 5, 7, 8, 11)]


def spec_of(family, ranks, microbatches, **numbers):
    return ScheduleSpec(family=ScheduleFamily(family), num_ranks=ranks, num_microbatches=microbatches, **numbers)


def measured(order):
    """(seconds, most activations each rank keeps) where a forward and each half of a backward last a second."""
    problem = Problem(
        graph=chain([node(1.0, saved=1) for _ in range(order.num_stages)]),
        machine=machine(),
        num_ranks=order.num_ranks,
        num_microbatches=order.num_microbatches,
        options=SearchOptions(backward="split" if order.is_split else "whole"),
    )
    slices = Slices(problem, np.arange(1, order.num_stages)[None], order.stage_ranks)
    graph = EventGraph(order, slices.messages)
    assert graph.runs
    kept = MemoryProfile(order).peaks(slices) - slices.buffer_bytes
    return float(graph.makespans(slices.durations, slices.optimizer_s)[0]), kept[:, 0]


def assert_complete(order):
    """Every job once, on the rank of its stage, and nothing else."""
    jobs = np.sort(np.concatenate(order.jobs))
    assert jobs.tolist() == list(range(order.num_jobs))
    for rank, own in enumerate(order.jobs):
        stages = own // order.num_microbatches % order.num_stages
        assert {order.stage_ranks[stage] for stage in stages.tolist()} <= {rank}


def dense(stage_ranks):
    """Every stage gives to every later one."""
    return tuple(
        Message(producer_stage=producer, consumer_rank=rank, consumer_stages=stages)
        for producer in range(len(stage_ranks))
        for rank in sorted(set(stage_ranks))
        if (stages := tuple(s for s in range(producer + 1, len(stage_ranks)) if stage_ranks[s] == rank))
    )


# -- the families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "loops"), [("wave", 1), ("wave", 2), ("wave", 3), ("zb-h1", 1), ("zb-v", 2)])
def test_every_order_is_complete_and_can_run_with_any_messages(family, loops):
    for ranks, microbatches in SIZES:
        spec = spec_of(family, ranks, microbatches, num_loops=loops)
        order = numbered(spec)
        assert_complete(order)
        assert order.is_split == spec.family.splits_backward
        schedule = build(spec)
        assert is_executable(schedule, chain_messages(schedule.stage_ranks))
        assert is_executable(schedule, dense(schedule.stage_ranks))
        if ranks * loops <= 8:
            lower(schedule, dense(schedule.stage_ranks))


def test_larger_orders_run_too():
    for family, loops in (("wave", 2), ("wave", 4), ("zb-h1", 1), ("zb-v", 2)):
        schedule = build(spec_of(family, 16, 40, num_loops=loops))
        assert is_executable(schedule, chain_messages(schedule.stage_ranks))


@pytest.mark.parametrize(("ranks", "microbatches"), [size for size in SIZES if size[0] > 1])
def test_zero_bubble_beats_1f1b_with_no_more_memory(ranks, microbatches):
    one, kept = measured(numbered(spec_of("1f1b", ranks, microbatches)))
    h1, kept_h1 = measured(numbered(spec_of("zb-h1", ranks, microbatches)))
    v, kept_v = measured(numbered(spec_of("zb-v", ranks, microbatches, num_loops=2)))
    assert h1 < one
    assert kept_h1.max() <= max(kept.max(), min(ranks, microbatches))
    # Its stages are half as large.
    assert v / 2 < one
    assert kept_v.max() / 2 <= min(ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 9), (3, 3), (4, 4), (4, 16), (8, 8), (8, 24)])
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(ranks, microbatches):
    """(D-1)(F + B - W) in place of (D-1)(F + B + W)."""
    seconds, _ = measured(numbered(spec_of("zb-h1", ranks, microbatches)))
    assert seconds == 3 * microbatches + ranks - 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (3, 7), (3, 12), (4, 8), (4, 24), (6, 24), (8, 32)])
def test_zb_v_has_at_most_half_of_the_bubble_of_1f1b(ranks, microbatches):
    v, _ = measured(numbered(spec_of("zb-v", ranks, microbatches, num_loops=2)))
    assert v / 2 - 3 * microbatches <= 3 * (ranks - 1) / 2


def test_zb_h1_drawn():
    rows = [" ".join(map(str, actions)) for actions in build(spec_of("zb-h1", 2, 3)).per_rank]
    assert rows == ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_a_wave_turns_round_and_is_no_slower_than_1f1b(ranks, microbatches):
    wave = numbered(spec_of("wave", ranks, microbatches, num_loops=2))
    assert wave.stage_ranks == (*range(ranks), *reversed(range(ranks)))
    seconds = measured(wave)[0] / 2
    bubble = 3 * (ranks - 1)
    assert seconds <= 3 * microbatches + bubble
    if microbatches >= 2 * ranks:
        assert seconds <= 3 * microbatches + 0.6 * bubble


@pytest.mark.parametrize(("ranks", "loops"), product((1, 2, 4), (1, 2, 3)))
def test_interleaved_is_looped_with_blocks_of_all_ranks_and_all_prefetch(ranks, loops):
    for microbatches in (1, ranks, 2 * ranks, 2 * ranks + 1):
        block = min(ranks, microbatches)
        same = looped(
            num_ranks=ranks,
            num_microbatches=microbatches,
            num_loops=loops,
            microbatches_per_loop=block,
            prefetch_forwards=ranks - 1,
        )
        assert build(spec_of("interleaved", ranks, microbatches, num_loops=loops)).per_rank == same.per_rank


def test_an_order_that_a_scheduler_made_follows_from_no_numbers():
    with pytest.raises(InternalError, match="PF213"):
        numbered(spec_of("list", 2, 4))


def test_no_complete_listing_is_a_fault_of_the_package(monkeypatch):
    nothing = Listing(start_s=[], end_s=0.0, jobs=((), ()), is_complete=False)
    monkeypatch.setattr(unit_orders, "list_schedule", lambda *_, **__: nothing)
    with pytest.raises(InternalError, match="PF214 no order for"):
        numbered(spec_of("wave", 2, 4, num_loops=2))


# -- orders as numbers -------------------------------------------------------------------------------------------------


def test_an_order_survives_as_actions_and_halves_follow_each_other():
    schedule = looped(num_ranks=2, num_microbatches=3, num_loops=2)
    order = order_of(schedule)
    assert schedule_of(order, schedule.spec) == schedule
    halves = schedule_of(split_backwards(order), schedule.spec)
    assert order_of(halves) is not None
    assert [str(a).replace("I", "B") for a in halves.per_rank[1] if "W" not in str(a)] == [
        str(a) for a in schedule.per_rank[1]
    ]
    rows = [str(action) for action in halves.per_rank[0]]
    assert all(rows[i + 1] == text.replace("I", "W") for i, text in enumerate(rows) if "I" in text)
    assert_complete(split_backwards(order))


# -- list scheduling ---------------------------------------------------------------------------------------------------


def a_listing(seed, *, with_room):
    """A random graph of jobs with random times; (graph, durations, room, listing)."""
    rng = random.Random(seed)
    stages = rng.randint(1, 6)
    ranks = tuple([*range(rng.randint(1, stages))])
    stage_ranks = [*ranks, *(rng.choice(ranks) for _ in range(stages - len(ranks)))]
    rng.shuffle(stage_ranks)
    microbatches, is_split = rng.randint(1, 5), rng.random() < 0.5
    graph = JobGraph(stage_ranks, rng.choice((chain_messages, dense))(stage_ranks), microbatches, is_split=is_split)
    rows = graph.num_nodes // microbatches
    duration_s = np.repeat([rng.choice((0.0, rng.uniform(0.1, 3))) for _ in range(rows)], microbatches).tolist()
    room = None
    if with_room:
        saved = tuple(float(rng.randint(0, 3)) for _ in stage_ranks)
        # Enough for one micro-batch on all stages of a rank.
        least = [sum(s for s, r in zip(saved, stage_ranks, strict=True) if r == rank) for rank in ranks]
        room = Room(saved_bytes=saved, free_bytes=tuple(size + rng.randint(0, 3) for size in least))
    urgency = [-tail for tail in graph.tails_s(duration_s)]
    return graph, duration_s, room, list_schedule(graph, duration_s, urgency, room=room)


@pytest.mark.parametrize("with_room", [False, True])
def test_nothing_starts_before_what_it_waits_for_and_nothing_runs_beside_another(with_room):
    complete = 0
    for seed in range(150):
        graph, duration_s, room, listing = a_listing(seed, with_room=with_room)
        assert with_room or listing.is_complete
        if not listing.is_complete:
            continue
        complete += 1
        start = listing.start_s
        used = [n for n in range(graph.num_nodes) if graph.resource[n] >= 0]
        for n in used:
            assert all(start[n] >= start[b] + duration_s[b] - 1e-9 for b in graph.before[n])
        for resource in range(graph.num_resources):
            line = sorted((start[n], start[n] + duration_s[n]) for n in used if graph.resource[n] == resource)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(line))
        assert listing.end_s == pytest.approx(max(start[n] + duration_s[n] for n in used))
        jobs = sorted(job for own in listing.jobs for job in own)
        assert jobs == list(range(graph.num_jobs))
        if room is not None:
            assert_room_is_kept(graph, room, listing)
    assert complete > 75


def assert_room_is_kept(graph, room, listing):
    stages, number = len(graph.stage_ranks), graph.num_microbatches
    last = graph.num_kinds - 1
    for rank, own in enumerate(listing.jobs):
        kept = 0.0
        for job in own:
            kind, stage = divmod(job // number, stages)
            if kind == 0:
                kept += room.saved_bytes[stage]
                assert kept <= room.free_bytes[rank]
            elif kind == last:
                kept -= room.saved_bytes[stage]


def test_no_room_at_all_is_told():
    graph = JobGraph((0, 1), chain_messages((0, 1)), 2)
    room = Room(saved_bytes=(2.0, 1.0), free_bytes=(1.0, 1.0))
    listing = list_schedule(graph, [1.0] * graph.num_nodes, [0.0] * graph.num_nodes, room=room)
    assert not listing.is_complete


def test_the_same_input_gives_the_same_order():
    for seed in range(20):
        assert a_listing(seed, with_room=True)[3] == a_listing(seed, with_room=True)[3]


def test_backwards_in_time_every_job_still_waits_for_what_it_needs():
    for seed in range(60):
        graph, duration_s, _, forward = a_listing(seed, with_room=False)
        ends = [start + lasts for start, lasts in zip(forward.start_s, duration_s, strict=True)]
        back = list_schedule(graph, duration_s, [-end for end in ends], reverse=True)
        assert back.is_complete
        start = [back.end_s - begun - lasts for begun, lasts in zip(back.start_s, duration_s, strict=True)]
        for n in range(graph.num_nodes):
            assert all(start[n] >= start[b] + duration_s[b] - 1e-9 for b in graph.before[n])


def test_tails_are_longest_paths():
    for seed in range(40):
        graph, duration_s, _, _ = a_listing(seed, with_room=False)

        def longest(n, graph=graph, duration_s=duration_s):
            return duration_s[n] + max((longest(later) for later in graph.after[n]), default=0.0)

        tails = graph.tails_s(duration_s)
        for n in random.Random(seed).sample(range(graph.num_jobs), min(4, graph.num_jobs)):
            if graph.num_jobs <= 30:
                assert tails[n] == pytest.approx(longest(n))
