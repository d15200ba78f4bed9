"""Moves of cuts: what a kick may do, and that the same random numbers give the same cuts."""

from __future__ import annotations

import numpy as np
import pytest

from pfeife_accelerate.planner import Problem, SearchOptions
from pfeife_accelerate.planner.refine import kicked
from pfeife_accelerate.planner.valuation import Effort, Valuation
from pfeife_accelerate.schedule.families import looped_order
from tests.cost_graphs import chain, machine, node

STARTING = (4, 10, 20)  # stage 0 is the shortest, the last one the longest


@pytest.fixture(scope="module")
def valuation():
    graph = chain([node(1.0 + 0.1 * (number % 3)) for number in range(40)])
    problem = Problem(graph=graph, machine=machine(), num_ranks=4, num_microbatches=8, options=SearchOptions())
    order = looped_order((0, 1, 2, 3), 8, block=8)
    return Valuation(problem, order, Effort(left_s=np.inf))


def kicks(valuation, seed, number=200):
    generator = np.random.default_rng(seed)
    return [kicked(valuation, np.asarray(STARTING), generator) for _ in range(number)]


def test_kicks_shift_cuts_that_are_neighbours_the_same_way_and_keep_all_stages(valuation):
    found = [cuts for cuts in kicks(valuation, 0) if cuts is not None and cuts.tolist() != list(STARTING)]
    assert len(found) > 50
    for cuts in found:
        assert (np.diff(cuts, prepend=0, append=40) > 0).all()
        changes = cuts - STARTING
        moved = np.flatnonzero(changes)
        assert len(set(np.sign(changes[moved]))) == 1
        assert len(moved) == 1 or moved[-1] - moved[0] < 3


def test_the_longest_stage_gives_more_often_than_it_takes(valuation):
    found = [cuts for cuts in kicks(valuation, 0) if cuts is not None]
    gives = sum(cuts[-1] > STARTING[-1] for cuts in found)
    takes = sum(cuts[-1] < STARTING[-1] for cuts in found)
    assert gives > 2 * takes


def test_the_same_random_numbers_give_the_same_cuts(valuation):
    first, second = kicks(valuation, 3), kicks(valuation, 3)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_single_stage_cannot_be_kicked():
    graph = chain([node() for _ in range(4)])
    problem = Problem(graph=graph, machine=machine(), num_ranks=1, num_microbatches=2, options=SearchOptions())
    valuation = Valuation(problem, looped_order((0,), 2, block=2), Effort(left_s=np.inf))
    assert kicked(valuation, np.empty(0, dtype=np.int64), np.random.default_rng(0)) is None
