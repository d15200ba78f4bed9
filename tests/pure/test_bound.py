"""The lower bound: never above a plan, and exactly what can be worked out by hand."""

from __future__ import annotations

import random
import sys
from itertools import combinations, permutations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfeife_accelerate.ir import CostGraph, CostValue
from pfeife_accelerate.planner import BoundKind, Problem, SearchOptions, lower_bound
from tests.cost_graphs import chain, machine, node, random_cost_graph, use
from tests.orders import random_order, random_placement

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from brute_force import optimum_s, problem_of
from event_simulator import simulate, simulate_layout
from pipeline_layout import Layout

EQUAL = 1 + 1e-9


def bound_of(graph, ranks, microbatches, *, backward="whole", where=None):
    return lower_bound(
        Problem(
            graph=graph,
            machine=where or machine(),
            num_ranks=ranks,
            num_microbatches=microbatches,
            options=SearchOptions(backward=backward),
        )
    )


def in_halves(per_rank):
    """Each backward as its halves, the weight gradients of each rank at its end."""
    rows = [[a.replace("B", "I") for a in row] for row in per_rank]
    return [[*row, *(a.replace("I", "W") for a in row if "I" in a)] for row in rows]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_one_rank_does_all_the_work():
    graph = chain([node(1.0, params=(use(0, optimizer_s=0.5),)), node(2.0)])
    bound = bound_of(graph, 1, 4)
    assert (bound.seconds, bound.kind) == (4 * 9.0 + 0.5, BoundKind.WORK)
    assert bound_of(graph, 1, 4, backward="split").seconds == 4 * 9.0 + 0.5


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_an_even_chain_has_a_ramp_at_both_ends(ranks, microbatches):
    """The r-th rank waits for r forwards of one operation, and is waited for by as many backwards."""
    bound = bound_of(chain(32), ranks, microbatches)
    assert bound.kind is BoundKind.WORK
    assert bound.seconds == pytest.approx(microbatches * 96 / ranks + (1 + 2) * (ranks - 1) / 2)


def test_with_halves_the_end_may_be_filled_with_weight_gradients():
    bound = bound_of(chain(32), 4, 8, backward="split")
    assert bound.seconds == pytest.approx(8 * 96 / 4 + 3 / 2)


def test_one_micro_batch_passes_everything():
    bound = bound_of(chain(6), 3, 1)
    assert (bound.seconds, bound.kind) == (18.0, BoundKind.PATH)
    # Of the weight gradients nobody on the way has to wait for any.
    assert bound_of(chain(6), 3, 1, backward="split").seconds == 12.0


def test_a_large_operation_runs_on_one_rank():
    """0.5 seconds come before it, and one of gradients after."""
    nodes = [node(0.5), node(20.0, params=(use(0, optimizer_s=0.25),)), node(0.5)]
    bound = bound_of(chain(nodes), 3, 4)
    assert (bound.seconds, bound.kind) == (0.5 + 4 * 60 + 1.0, BoundKind.NODE)
    assert bound_of(chain(nodes), 3, 4, backward="split").seconds == 0.5 + 4 * 60 + 0.25


def test_branches_beside_each_other_are_no_path():
    """Of two branches the longer one: 0 -> 1 -> 3 and 0 -> 2 -> 3."""
    nodes = (node(1.0), node(5.0), node(2.0), node(1.0))
    edges = ((0, (1, 2)), (1, (3,)), (2, (3,)))
    values = tuple(CostValue(producer=p, readers=r, num_bytes=1, gradient_bytes=1) for p, r in edges)
    bound = bound_of(CostGraph(name="branches", nodes=nodes, values=values), 2, 1)
    assert (bound.seconds, bound.kind) == (3 * (1 + 5 + 1), BoundKind.PATH)


def test_frozen_operations_give_no_gradient_to_wait_for():
    """The first two have no backward, and the third gives them none."""
    nodes = [node(1.0, backward=(0.0, 0.0)), node(1.0, backward=(0.0, 0.0)), node(1.0), node(1.0)]
    assert bound_of(chain(nodes, frozen=2), 2, 1).seconds == 4 * 1 + 2 * 2
    assert bound_of(chain(nodes, frozen=2), 4, 1).seconds == 4 * 1 + 2 * 2


def test_a_tied_parameter_is_stepped_once_at_least():
    tied = [node(params=(use(0, optimizer_s=6.0),)), node(), node(params=(use(0, optimizer_s=6.0),))]
    assert bound_of(chain(tied), 1, 2).seconds == 2 * 9 + 6.0
    twice = [node(params=(use(0, optimizer_s=6.0), use(0, optimizer_s=6.0)))]
    assert bound_of(chain(twice), 1, 2).seconds == 2 * 3 + 6.0


def test_uses_that_disagree_about_a_parameter_do_not_raise_the_bound():
    """The first use tells, to the bound as to the plan."""
    nodes = [node(params=(use(0, 4, optimizer_s=0.0),)), node(params=(use(0, 8, optimizer_s=50.0),))]
    assert bound_of(chain(nodes), 2, 2).seconds <= 12.0


def test_nothing_to_do_takes_no_time_and_has_no_gap():
    bound = bound_of(chain([node(0.0)] * 4), 2, 4)
    assert (bound.seconds, bound.gap(0.0), bound.gap(1.0)) == (0.0, 0.0, 0.0)
    assert bound_of(chain(4), 1, 1).gap(15.0) == pytest.approx(0.25)


# -- never above a plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40, 46))
def test_it_is_not_above_the_best_plan_of_the_families(seed):
    problem = problem_of(seed)
    bound = bound_of(problem.graph, problem.ranks, problem.microbatches, where=problem.machine)
    assert 0 < bound.seconds <= optimum_s(problem) * EQUAL


def all_orders(stage_ranks, microbatches, letters):
    """Every order of every rank's actions, those that cannot run among them."""
    ranks = max(stage_ranks) + 1
    own = [
        [
            f"{stage}{letter}{m}"
            for stage, owner in enumerate(stage_ranks)
            if owner == rank
            for letter in letters
            for m in range(microbatches)
        ]
        for rank in range(ranks)
    ]
    return product(*(permutations(actions) for actions in own))


@pytest.mark.parametrize(
    ("stage_ranks", "microbatches", "letters"), [((0, 1), 2, "FB"), ((0, 1, 0), 1, "FB"), ((0, 1), 1, "FIW")]
)
def test_it_is_not_above_any_order_at_all(stage_ranks, microbatches, letters):
    orders = list(all_orders(stage_ranks, microbatches, letters))
    for seed in range(6):
        graph = random_cost_graph(seed, least=3, most=5)
        bound = bound_of(graph, 2, microbatches, backward="split" if "W" in letters else "whole")
        best_s = float("inf")
        for cuts in combinations(range(1, len(graph.nodes)), len(stage_ranks) - 1):
            layout = Layout(graph, cuts, stage_ranks, 2)
            outcomes = (simulate_layout(layout, machine(), order) for order in orders)
            best_s = min(best_s, *(outcome.makespan_s for outcome in outcomes if outcome is not None))
        assert bound.seconds <= best_s * EQUAL


@given(seed=st.integers(0, 10**6), backward=st.sampled_from(("whole", "split")))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_it_is_not_above_random_plans(seed, backward):
    """Any cuts, any placement, any order that runs, links that take no time."""
    rng = random.Random(seed)
    graph = random_cost_graph(seed)
    ranks = rng.randint(1, min(3, len(graph.nodes)))
    stages = rng.randint(ranks, min(6, len(graph.nodes)))
    cuts = sorted(rng.sample(range(1, len(graph.nodes)), stages - 1))
    microbatches = rng.randint(1, 3)
    placement = random_placement(ranks, stages, seed)
    per_rank = random_order(placement, microbatches, seed)
    outcome = simulate(graph, machine(), cuts, placement, in_halves(per_rank) if backward == "split" else per_rank)
    assert outcome is not None
    assert bound_of(graph, ranks, microbatches, backward=backward).seconds <= outcome.makespan_s * EQUAL
