"""Times by arrays against the planner's simulation of lists, and against a simulator that shares code with neither."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pfeife_accelerate.ir import LinkSpec, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.planner import MessageBytes, Problem, SearchOptions, simulate
from pfeife_accelerate.planner.event_graph import EventGraph
from pfeife_accelerate.planner.memory import MemoryProfile
from pfeife_accelerate.planner.search import _stage_costs
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.planner.valuation import Effort, Valuation
from pfeife_accelerate.schedule import chain_messages, looped, lower
from pfeife_accelerate.schedule.order import Order, order_of, schedule_of, split_backwards
from tests.cost_graphs import chain, machine, node, random_cost_graph, random_machine
from tests.orders import random_placement

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from event_simulator import simulate_layout
from pipeline_layout import Layout

SEEDS = range(80)


def executable_order(rng, stage_ranks, microbatches, is_split):
    """A random order that respects everything that any graph could ask for."""
    stages = len(stage_ranks)
    kinds = 3 if is_split else 2
    waiting = {
        (microbatch, stage): [(kind * stages + stage) * microbatches + microbatch for kind in range(kinds)]
        for microbatch in range(microbatches)
        for stage in range(stages)
    }
    done = set()
    jobs = [[] for _ in range(max(stage_ranks) + 1)]
    while waiting:
        ready = []
        for (microbatch, stage), left in waiting.items():
            kind = left[0] // (stages * microbatches)
            before = range(stage) if kind == 0 else range(stage + 1, stages) if kind == 1 else ()
            if all((kind * stages + other) * microbatches + microbatch in done for other in before):
                ready.append((microbatch, stage))
        chosen = rng.choice(ready)
        job = waiting[chosen].pop(0)
        done.add(job)
        jobs[stage_ranks[chosen[1]]].append(job)
        if not waiting[chosen]:
            del waiting[chosen]
    return Order(
        jobs=tuple(np.asarray(own, dtype=np.int64) for own in jobs),
        stage_ranks=tuple(stage_ranks),
        num_microbatches=microbatches,
        is_split=is_split,
    )


def a_case(seed, *, connected=False):
    """(problem, order, several slicings with as many stages as the order)."""
    rng = random.Random(f"case {seed}")
    graph = random_cost_graph(seed, connected=connected)
    is_split = rng.random() < 0.5
    most = min(7, len(graph.legal_cuts) + 1)
    stages = rng.randint(min(2, most), most)
    ranks = rng.randint(1, min(3, stages))
    problem = Problem(
        graph=graph,
        machine=random_machine(seed, ranks),
        num_ranks=ranks,
        num_microbatches=rng.randint(1, 4),
        options=SearchOptions(backward="split" if is_split else "whole"),
    )
    order = executable_order(rng, random_placement(ranks, stages, seed), problem.num_microbatches, is_split)
    cuts = [sorted(rng.sample(graph.legal_cuts, stages - 1)) for _ in range(6)]
    return problem, order, np.asarray(cuts, dtype=np.int64).reshape(6, stages - 1)


def spec_of(order):
    return ScheduleSpec(family=ScheduleFamily.LIST, num_ranks=order.num_ranks, num_microbatches=order.num_microbatches)


def simulated_s(problem, order, cuts, recompute=()):
    """The step of the lowered lists, each rank's optimizer step included."""
    slices = Slices(problem, cuts[None], order.stage_ranks, recompute)
    there, back = slices.message_bytes
    sizes = tuple(
        MessageBytes(forward_bytes=round(a), gradient_bytes=round(b))
        for a, b in zip(there[:, 0].tolist(), back[:, 0].tolist(), strict=True)
    )
    lowered = lower(schedule_of(order, spec_of(order)), slices.messages)
    timeline = simulate(lowered, _stage_costs(slices), slices.messages, sizes, problem.machine)
    ends = [0.0] * problem.num_ranks
    for interval in timeline.intervals:
        peer = interval.action.peer
        if peer is None or problem.machine.link_of(interval.rank, peer).is_copied:
            ends[interval.rank] = max(ends[interval.rank], interval.end_s)
    return max(end + step for end, step in zip(ends, slices.optimizer_s[:, 0], strict=True))


def alone_s(problem, order, cuts, recompute=()):
    """The step by the event graph of this slicing's own messages."""
    slices = Slices(problem, cuts[None], order.stage_ranks, recompute)
    graph = EventGraph(order, slices.messages)
    assert graph.runs
    return float(graph.makespans(slices.durations, slices.optimizer_s)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_longest_path_is_the_simulated_step(seed):
    problem, order, cuts = a_case(seed)
    recompute = tuple(stage for stage in range(order.num_stages) if (seed + stage) % 3 == 0)
    for row in cuts[:2]:
        for again in ((), recompute):
            assert alone_s(problem, order, row, again) == pytest.approx(simulated_s(problem, order, row, again))


def is_alike(layout, slices, problem):
    """Whether the other simulator models these messages as we do.

    It sends what a stage makes for several stages of a rank in several messages, and waits for the gradients of single
    tensors where we wait for those of a message; gradients of one job that share a link have no order given.
    """
    ranks = slices.stage_ranks.tolist()
    pairs = [(message.producer, message.receiver) for message in layout.messages]
    contributors = {(m.producer, m.receiver): len(m.contributors) for m in layout.messages if m.contributors}
    answered = [
        (consumer, ranks[m.producer_stage])
        for m in slices.messages
        if m.has_grad and ranks[m.producer_stage] != m.consumer_rank
        for consumer in m.consumer_stages
    ]
    return (
        not problem.machine.device_of(0).action_s
        and len(set(pairs)) == len(pairs)
        and len(set(answered)) == len(answered)
        and all(
            len(m.consumer_stages) == 1
            if ranks[m.producer_stage] == m.consumer_rank
            else contributors.get((m.producer_stage, m.consumer_rank), 0) == len(m.consumer_stages) * m.has_grad
            for m in slices.messages
        )
    )


@pytest.fixture(scope="module")
def compared():
    return []


@pytest.mark.parametrize("seed", SEEDS)
def test_another_simulator_agrees(seed, compared):
    problem, order, cuts = a_case(seed)
    per_rank = [list(map(str, actions)) for actions in schedule_of(order, spec_of(order)).per_rank]
    for row in cuts:
        layout = Layout(problem.graph, row.tolist(), order.stage_ranks, problem.num_ranks)
        outcome = simulate_layout(layout, problem.machine, per_rank)
        slices = Slices(problem, row[None], order.stage_ranks)
        peaks = (MemoryProfile(order).peaks(slices) - slices.buffer_bytes)[:, 0]  # the simulator has none
        assert peaks.round().astype(int).tolist() == list(outcome.peak_bytes)
        if is_alike(layout, slices, problem):
            compared.append(seed)
            assert alone_s(problem, order, row) == pytest.approx(outcome.makespan_s)


def test_the_other_simulator_was_asked_often(compared):
    assert len(set(compared)) > len(SEEDS) / 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_of_slicings_is_the_same_as_one_by_one(seed):
    """Where all send the same; else a batch may say more, or less where they send in another order; `exact` is true."""
    problem, order, cuts = a_case(seed, connected=seed % 2 == 0)
    valuation = Valuation(problem, order, Effort(left_s=np.inf))
    batch = valuation.values(cuts)
    single = [alone_s(problem, order, row) for row in cuts]
    assert [valuation.exact(row) for row in cuts] == pytest.approx(single)
    together = Slices(problem, cuts, order.stage_ranks)
    routes = [message.route for message in together.messages]
    for row, value, alone in zip(cuts, batch, single, strict=True):
        messages = Slices(problem, row[None], order.stage_ranks).messages
        places = [routes.index(message.route) for message in messages]
        if places == sorted(places):
            assert value >= alone * (1 - 1e-9)
        if messages == together.messages:
            assert value == pytest.approx(alone)


@pytest.mark.parametrize("seed", range(30))
def test_a_plain_chain_in_a_batch_is_exact(seed):
    rng = random.Random(seed)
    problem, order, _ = a_case(seed)
    nodes = [node(rng.uniform(0.1, 2), saved=rng.randint(0, 9)) for _ in range(12)]
    problem = Problem(
        graph=chain(nodes, num_bytes=rng.randint(1, 9)),
        machine=problem.machine,
        num_ranks=problem.num_ranks,
        num_microbatches=problem.num_microbatches,
        options=problem.options,
    )
    cuts = np.asarray([sorted(rng.sample(range(1, 12), order.num_stages - 1)) for _ in range(5)], dtype=np.int64)
    cuts = cuts.reshape(5, order.num_stages - 1)
    batch = Valuation(problem, order, Effort(left_s=np.inf)).values(cuts)
    assert batch.tolist() == pytest.approx([simulated_s(problem, order, row) for row in cuts])


def test_an_order_that_deadlocks_is_told():
    schedule = looped(num_ranks=4, num_microbatches=5, num_loops=3, microbatches_per_loop=4, prefetch_forwards=3)
    for order in (order_of(schedule), split_backwards(order_of(schedule))):
        graph = EventGraph(order, chain_messages(order.stage_ranks))
        assert (graph.runs, graph.num_levels) == (False, 0)


def test_an_order_against_its_own_dependencies_is_told():
    """A backward before its forward, a later stage before the earlier one of the same rank, a gradient too early."""
    for jobs, ranks, messages in (
        ([[1, 0]], (0,), ()),
        ([[1, 0, 3, 2]], (0, 0), chain_messages((0, 0))),
        ([[0, 1, 2, 3]], (0, 0), chain_messages((0, 0))),
    ):
        order = Order(jobs=tuple(np.asarray(own) for own in jobs), stage_ranks=ranks, num_microbatches=1)
        assert not EventGraph(order, messages).runs


@pytest.mark.parametrize(("runs_ahead", "expected"), [(True, 2 * (1.5 + 2.0)), (False, 2 * (1.0 + 1.5 + 2.0 + 1.5))])
def test_the_host_starts_actions_beside_the_device_or_before_it(runs_ahead, expected):
    """Two micro-batches on one rank: forwards of 1, backwards of 2, the host needs 1.5."""
    graph = chain([node(1.0)])
    host = machine(action_s=1.5, runs_ahead=runs_ahead)
    problem = Problem(graph=graph, machine=host, num_ranks=1, num_microbatches=2, options=SearchOptions())
    order = Order(jobs=(np.asarray([0, 2, 1, 3]),), stage_ranks=(0,), num_microbatches=2)
    assert alone_s(problem, order, np.empty(0, dtype=np.int64)) == pytest.approx(expected)


def test_a_message_of_no_bytes_takes_its_latency():
    graph = chain([node(1.0), node(1.0)], num_bytes=0)
    problem = Problem(
        graph=graph, machine=machine(latency_s=5.0), num_ranks=2, num_microbatches=1, options=SearchOptions()
    )
    order = Order(jobs=(np.asarray([0, 2]), np.asarray([1, 3])), stage_ranks=(0, 1), num_microbatches=1)
    # No gradient bytes are no gradient: the first stage's backward waits for nobody.
    assert alone_s(problem, order, np.asarray([1])) == pytest.approx(1 + 5 + 1 + 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_devices_copy_themselves_is_simulated_alike(seed):
    problem, order, cuts = a_case(seed)
    plain = problem.machine
    near = replace(plain, link=replace(plain.link, is_copied=True))
    both = near
    if near.link_between_hosts is not None:
        both = replace(near, link_between_hosts=replace(near.link_between_hosts, is_copied=True))
    for machine_ in (near, both):
        copying = replace(problem, machine=machine_)
        for row in cuts[:2]:
            assert alone_s(copying, order, row) == pytest.approx(simulated_s(copying, order, row))


def test_copying_keeps_both_devices_busy():
    """Two stages, two micro-batches, messages of 4: the sender copies for 2, then the reader for 2; 1F1B."""
    graph = chain(2, num_bytes=4)
    copying = machine(bytes_per_s=1.0)
    copying = replace(copying, link=replace(copying.link, is_copied=True))
    problem = Problem(graph=graph, machine=copying, num_ranks=2, num_microbatches=2, options=SearchOptions())
    order = Order(jobs=(np.asarray([0, 1, 4, 5]), np.asarray([2, 6, 3, 7])), stage_ranks=(0, 1), num_microbatches=2)
    # Rank 0: 1F, 2 out, 1F, 2 out. Rank 1 from 3 on: 2 in, 1F, 2B, 2 out (to 10), 2 in, 1F, 2B, 2 out (to 17).
    # Rank 0: 2 in, 2B (to 14), and from 17 on once more.
    assert alone_s(problem, order, np.asarray([1])) == pytest.approx(21)
    assert simulated_s(problem, order, np.asarray([1])) == pytest.approx(21)


def test_messages_between_hosts_take_the_link_between_hosts():
    graph = chain(4, num_bytes=6)
    far = machine(bytes_per_s=6.0, between=LinkSpec(latency_s=1.0, bytes_per_s=2.0))
    problem = Problem(graph=graph, machine=far, num_ranks=4, num_microbatches=1, options=SearchOptions())
    order = Order(
        jobs=tuple(np.asarray([rank, 4 + rank]) for rank in range(4)), stage_ranks=(0, 1, 2, 3), num_microbatches=1
    )
    assert alone_s(problem, order, np.asarray([1, 2, 3])) == pytest.approx(4 * 3 + 2 * (1 + 4 + 1))


def test_the_longest_path_counts_what_is_on_it():
    """One micro-batch through three stages: each forward, each backward and each message once."""
    graph = chain(3, num_bytes=1)
    problem = Problem(
        graph=graph, machine=machine(bytes_per_s=1.0), num_ranks=3, num_microbatches=1, options=SearchOptions()
    )
    order = Order(jobs=tuple(np.asarray([r, 3 + r]) for r in range(3)), stage_ranks=(0, 1, 2), num_microbatches=1)
    slices = Slices(problem, np.asarray([[1, 2]]), order.stage_ranks)
    graph = EventGraph(order, slices.messages)
    assert graph.critical_rows(slices.durations, slices.optimizer_s).tolist() == [1] * 10
