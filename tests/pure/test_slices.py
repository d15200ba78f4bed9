"""Costs of stages and messages by arrays, against the plainest way to count them; starting cuts against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import CostGraph, CostValue
from pfeife_accelerate.planner import Problem, SearchOptions
from pfeife_accelerate.planner.problem import MAX_POSITIONS
from pfeife_accelerate.planner.shapes import equal_time_cuts, profiles, shaped_cuts
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.planner.starts import starting_cuts
from pfeife_accelerate.schedule import Message, chain_messages
from tests.cost_graphs import chain, machine, node, random_cost_graph, use
from tests.orders import random_placement


def problem_of(graph, ranks=2, microbatches=4, **options):
    return Problem(
        graph=graph,
        machine=machine(),
        num_ranks=ranks,
        num_microbatches=microbatches,
        options=SearchOptions(**options),
    )


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_stages_and_messages_are_those_counted_one_by_one(seed):
    rng = random.Random(seed)
    graph = random_cost_graph(seed)
    stages = rng.randint(1, min(6, len(graph.legal_cuts) + 1))
    ranks = rng.randint(1, stages)
    placement = random_placement(ranks, stages, seed)
    cuts = [sorted(rng.sample(graph.legal_cuts, stages - 1)) for _ in range(4)]
    slices = Slices(problem_of(graph, ranks), np.asarray(cuts, dtype=np.int64).reshape(4, stages - 1), placement)
    for column, row in enumerate(cuts):
        bounds = list(pairwise((0, *row, len(graph.nodes))))
        for stage, (first, last) in enumerate(bounds):
            nodes = graph.nodes[first:last]
            assert slices.forward_s[stage, column] == pytest.approx(sum(n.forward_s for n in nodes))
            assert slices.backward_s[0][stage, column] == pytest.approx(sum(n.backward_s for n in nodes))
            assert slices.saved_bytes[stage, column] == sum(n.saved_bytes for n in nodes)
            assert slices.stage_param_bytes[stage, column] == sum(
                {u.owner: u.num_bytes for n in nodes for u in n.params}.values()
            )
        assert_ranks_own(slices, graph, bounds, placement, column)
        assert_messages(slices, graph, bounds, placement, column)


def assert_ranks_own(slices, graph, bounds, placement, column):
    for rank in range(max(placement) + 1):
        own = {
            u.owner: u
            for (first, last), owner in zip(bounds, placement, strict=True)
            if owner == rank
            for n in graph.nodes[first:last]
            for u in n.params
        }
        assert slices.param_bytes[rank, column] == sum(u.num_bytes for u in own.values())
        assert slices.state_bytes[rank, column] == sum(u.state_bytes for u in own.values())
        assert slices.optimizer_s[rank, column] == pytest.approx(sum(u.optimizer_s for u in own.values()))


def assert_messages(slices, graph, bounds, placement, column):
    stage_of = [stage for stage, (first, last) in enumerate(bounds) for _ in range(first, last)]
    expected = {}
    inputs = [0] * len(bounds)
    for value in graph.values:
        producer = stage_of[value.producer]
        readers = {stage_of[r] for r in value.readers} - {producer}
        for stage in readers:
            inputs[stage] += value.num_bytes
        for rank in {placement[s] for s in readers}:
            on_rank = {s for s in readers if placement[s] == rank}
            there, back, consumers = expected.get((producer, min(on_rank)), (0, 0, set()))
            sizes = there + value.num_bytes, back + value.gradient_bytes
            expected[producer, min(on_rank)] = (*sizes, consumers | on_rank)
    there, back = slices.message_bytes
    for index, message in enumerate(slices.messages):
        found = expected.pop((message.producer_stage, message.reader), (0, 0, set()))
        assert (there[index, column], back[index, column]) == found[:2]
        assert found[2] <= set(message.consumer_stages)
        assert message.has_grad or not found[1]
    assert not expected
    assert slices.input_bytes[:, column].tolist() == inputs


def test_a_plain_chain_has_the_chain_messages():
    assert Slices(problem_of(chain(6), 3), np.asarray([[2, 4]]), (0, 1, 2)).messages == chain_messages((0, 1, 2))


def test_a_skip_goes_directly_and_once_to_each_rank():
    edges = ((0, (2, 3, 4), 8, 0), (1, (2, 4), 4, 4), (2, (3,), 4, 4), (3, (4,), 4, 4))
    values = tuple(CostValue(producer=p, readers=r, num_bytes=n, gradient_bytes=g) for p, r, n, g in edges)
    graph = CostGraph(name="skip", nodes=(node(),) * 5, values=values)
    slices = Slices(problem_of(graph), np.asarray([[2, 3, 4]]), (0, 1, 0, 1))
    assert slices.messages == (
        Message(producer_stage=0, consumer_rank=1, consumer_stages=(1, 3), has_grad=True),
        Message(producer_stage=0, consumer_rank=0, consumer_stages=(2,), has_grad=False),
        Message(producer_stage=1, consumer_rank=0, consumer_stages=(2,), has_grad=True),
        Message(producer_stage=2, consumer_rank=1, consumer_stages=(3,), has_grad=True),
    )
    assert [sizes[:, 0].tolist() for sizes in slices.message_bytes] == [[12, 8, 4, 4], [4, 0, 4, 4]]


def test_a_value_that_is_read_before_it_is_made_is_refused():
    with pytest.raises(InternalError, match="PF153"):
        CostGraph(name="x", nodes=(node(),) * 2, values=(CostValue(producer=1, readers=(1,), num_bytes=1),))


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "nodes_of",
    [
        lambda number: node(number),
        lambda number: node(backward=(number, 1.0)),
        lambda number: node(backward=(1.0, number)),
        lambda number: node(saved=number),
        lambda number: node(workspace=number),
        lambda number: node(params=(use(0, number),)),
        lambda number: node(params=(use(0, optimizer_s=number),)),
    ],
)
def test_costs_that_nothing_can_have_are_refused(nodes_of, number):
    with pytest.raises(InternalError, match=r"PF153 \w+=(-1.0|nan|inf|-4.0) in"):
        CostGraph(name="x", nodes=(node(), nodes_of(number)), values=())


@pytest.mark.parametrize("field", ["num_bytes", "gradient_bytes"])
def test_sizes_that_no_value_can_have_are_refused(field):
    sizes = {"num_bytes": 1, field: -1}
    with pytest.raises(InternalError, match=f"PF153 {field}=-1 in"):
        CostGraph(name="x", nodes=(node(),) * 2, values=(CostValue(producer=0, readers=(1,), **sizes),))


def test_messages_of_a_stage_come_in_the_order_in_which_it_makes_the_first_value_of_each():
    values = (
        CostValue(producer=0, readers=(3,), num_bytes=1),
        CostValue(producer=1, readers=(2,), num_bytes=1),
        CostValue(producer=1, readers=(3,), num_bytes=1),
    )
    graph = CostGraph(name="x", nodes=(node(),) * 4, values=values)
    turned = CostGraph(name="x", nodes=(node(),) * 4, values=(replace(values[0], readers=(2,)), values[2]))
    for one, readers in ((graph, [2, 1]), (turned, [1, 2])):
        found = Slices(problem_of(one), np.asarray([[2, 3]]), (0, 1, 1)).messages
        assert [message.reader for message in found] == readers


# -- starting cuts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_equal_time_has_the_shortest_longest_stage_of_all_slicings(stages):
    tried = 0
    for seed in range(60):
        graph = random_cost_graph(seed, connected=True)
        problem = problem_of(graph, stages)
        if len(graph.legal_cuts) < stages - 1 or not graph.work_s:
            continue
        tried += 1
        seconds = [n.forward_s + n.backward_s for n in graph.nodes]

        def longest(cuts, seconds=seconds):
            return max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))

        best = min(longest(cuts) for cuts in combinations(graph.legal_cuts, stages - 1))
        cuts = equal_time_cuts(problem, stages).tolist()
        assert set(cuts) <= set(graph.legal_cuts)
        assert longest(cuts) == pytest.approx(best)
    assert tried > 40


def test_an_even_chain_is_cut_evenly():
    problem = problem_of(chain(12), 4)
    assert equal_time_cuts(problem, 4).tolist() == [3, 6, 9]
    assert shaped_cuts(problem, np.ones((1, 4))).tolist() == [[3, 6, 9]]
    assert shaped_cuts(problem, np.asarray([[1.0, 2.0, 2.0, 1.0]])).tolist() == [[2, 6, 10]]


def test_profiles_start_with_equal_stages_and_grow_towards_the_middle():
    for ranks, loops in ((2, 1), (2, 2), (4, 3), (8, 4)):
        table = profiles(ranks, loops, fine=True)
        assert (table[0] == 1).all()
        assert (table > 0).all()
        assert len(np.unique(table / table.sum(axis=1, keepdims=True), axis=0)) == len(table)
    assert profiles(1, 1, fine=True).tolist() == [[1.0]]


@pytest.mark.parametrize("seed", range(40))
def test_every_start_is_a_slicing_at_legal_positions(seed):
    graph = random_cost_graph(seed, least=6)
    legal = set(graph.legal_cuts)
    for ranks, loops in ((2, 1), (2, 2), (3, 1), (1, 3)):
        if ranks * loops > len(legal) + 1:
            continue
        cuts = starting_cuts(problem_of(graph, ranks), ranks * loops, fine=True)
        assert cuts.shape[1] == ranks * loops - 1
        assert set(cuts.ravel().tolist()) <= legal
        assert (np.diff(cuts, axis=1) > 0).all()


# -- positions ---------------------------------------------------------------------------------------------------------


def test_all_legal_positions_of_a_small_graph_are_looked_at():
    graph = chain([node(cut=index not in (2, 5)) for index in range(8)])
    assert problem_of(graph).positions.tolist() == [1, 3, 4, 6, 7]


def test_thinning_keeps_the_narrow_positions():
    """One narrow position in every ten, in a graph larger than the search looks at position by position."""
    values = tuple(
        CostValue(producer=i, readers=(i + 1,), num_bytes=1 if i % 10 == 9 else 1000) for i in range(MAX_POSITIONS * 3)
    )
    graph = CostGraph(name="wide", nodes=(node(0.01),) * (MAX_POSITIONS * 3 + 1), values=values)
    positions = problem_of(graph, 4).positions
    assert len(positions) <= MAX_POSITIONS
    assert set(range(10, len(graph.nodes), 10)) <= set(positions.tolist())


def test_what_takes_no_time_but_memory_can_be_cut_everywhere():
    """A hundred free operations with parameters between two that work."""
    nodes = [node(1.0), *(node(0.0, params=(use(i, 10),)) for i in range(100)), node(1.0)]
    assert problem_of(chain(nodes)).positions.tolist() == list(range(1, 102))


@pytest.mark.parametrize("ranks", [4, 40])
def test_free_operations_can_be_cut_where_there_are_no_others(ranks):
    assert len(problem_of(chain([node(0.0)] * 200), ranks).positions) >= ranks - 1


def test_free_operations_between_working_ones_are_cut_once():
    """Where least crosses: behind the last of three."""
    nodes, values = [], []
    for index in range(300):
        nodes.append(node(1.0 if index % 3 == 0 else 0.0))
        if index < 299:
            values.append(CostValue(producer=index, readers=(index + 1,), num_bytes=1 if index % 3 == 2 else 5))
    graph = CostGraph(name="free", nodes=tuple(nodes), values=tuple(values))
    assert set(problem_of(graph).positions.tolist()) == set(range(3, 300, 3)) | {298}
