"""The search against all cuts and all orders of the families, on random small graphs; the benchmark does it on 200."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from brute_force import family_orders, optimum_s, problem_of, result_of
from event_simulator import simulate
from pipeline_orders import round_robin

SEEDS = (0, 2, 4, 8, 11, 15, 19, 22, 24, 29)


@pytest.fixture(scope="module")
def results():
    return [result_of(seed) for seed in SEEDS]


def test_plans_of_small_graphs_keep_the_planners_promises(results):
    assert {result.seed: result.problems for result in results if result.problems} == {}


def test_no_plan_of_the_families_is_2_percent_better_than_ours(results):
    assert {result.seed: result.ratio for result in results if result.ratio > 1.02} == {}


def test_nearly_all_small_graphs_get_the_best_plan_of_the_families(results):
    assert sum(result.is_optimal for result in results) >= len(SEEDS) - 1


@pytest.mark.parametrize("seed", [1, 3, 6])
def test_brute_force_leaves_no_better_plan_out(seed):
    """Without the bound by work that it saves time with."""
    problem = problem_of(seed)
    limit_bytes, ranks = problem.machine.device_of(0).memory_bytes, problem.ranks
    outcomes = [
        simulate(problem.graph, problem.machine, cuts, round_robin(ranks, loops), order)
        for loops in range(1, len(problem.graph.nodes) // ranks + 1)
        for order in family_orders(ranks, problem.microbatches, loops)
        for cuts in combinations(range(1, len(problem.graph.nodes)), ranks * loops - 1)
    ]
    best_s = min(outcome.makespan_s for outcome in outcomes if outcome and outcome.fits(limit_bytes))
    assert optimum_s(problem) == best_s
