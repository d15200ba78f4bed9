"""The table of plans: whom it compares with, what it calls a problem, and a few of its rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from baselines import Baseline
from event_simulator import Outcome
from pipeline_orders import Parameters
from plan_judging import Judged
from plans import Case, named_cases, peers_s, random_cases, row_of
from plans_table import Row, markdown

GIB = 2**30


def a_row(*, ours_s=0.9, bound_s=0.8, problems=(), split=None, **changes):
    outcome = Outcome(end_s=(1.0,), busy_s=(1.0,), peak_bytes=(1,), link_busy_s={})
    values = {
        "graph": "a_graph",
        "ranks": 2,
        "microbatches": 4,
        "limit_bytes": 40 * GIB,
        "baseline": Baseline(parameters=Parameters(loops=1, per_loop=2, prefetch=0), cuts=(1,), outcome=outcome),
        "whole": Judged(makespan_s=ours_s, bound_s=bound_s, planning_s=0.1, order="looped x3", problems=problems),
        "split": split,
    }
    return Row(**{**values, **changes})


# -- the others --------------------------------------------------------------------------------------------------------


def test_peers_are_those_of_the_row():
    assert peers_s("vit_g14_mb24", 2, 4, 40 * GIB) == {
        "equal_params_1f1b": pytest.approx(0.4651),
        "equal_time_1f1b": pytest.approx(0.4650),
        "equal_time_interleaved": pytest.approx(0.3985),
        "equal_time_looped": pytest.approx(0.4044),
        "authors": pytest.approx(0.3889),
    }
    assert "authors" not in peers_s("vit_g14_mb24", 2, 32, 40 * GIB)
    assert peers_s("another", 2, 4, 40 * GIB) == {}


def test_a_peer_that_exceeds_the_memory_counts_only_with_more_of_it():
    assert peers_s("llama2_7b_s1024_mb1", 2, 32, 40 * GIB) == {}
    assert peers_s("llama2_7b_s1024_mb1", 2, 32, 80 * GIB)["equal_time_looped"] == pytest.approx(3.5096)


def test_the_best_of_the_others_is_the_fastest_of_all():
    row = a_row(peers_s={"authors": 0.95, "equal_time_1f1b": 1.2})
    assert (row.best_s, row.ratio) == (0.95, pytest.approx(0.9 / 0.95))
    assert not row.is_above
    assert a_row(ours_s=1.01).is_above


def test_there_are_36_named_rows_and_the_random_ones_are_the_same_each_time():
    names = ["a", "b", "c"]
    assert len(list(named_cases(names, [2, 4, 8], [4, 8, 16, 32], True))) == 36
    assert list(random_cases(5, 3, True)) == list(random_cases(8, 0, True))[3:]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_shows_gaps_means_and_what_is_wrong():
    split = Judged(makespan_s=0.85, bound_s=0.8, planning_s=0.2)
    rows = [a_row(split=split), a_row(ours_s=1.1, problems=("the plan deadlocks",), raised=True)]
    text = markdown(rows, "a command", "Plans")
    assert "| a_graph | 2 | 4 | 40 | 1000.0 | looped (1,2,0) | 900.0 | 0.900 | 800.0 | 12.5% | 25.0% |" in text
    assert "| 850.0 | 0.850 | 0.1 + 0.2 |" in text
    assert "40 (raised)" in text
    assert "**1.100**" in text
    assert "| all | 2 | 0.9950 | 1.1000 |" in text
    assert "Plans above the best of the others: 1 of 2." in text
    assert "- a_graph, 2 ranks, 4 micro-batches: the plan deadlocks" in text


def test_a_bound_above_another_plan_is_a_problem():
    assert a_row().problems == ()
    (problem,) = a_row(ours_s=1.5, bound_s=1.2).problems
    assert "bound 1200.0 ms above the 1000.0 ms of another plan" in problem


# -- some rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(file="vit_g14_mb24", ranks=4, microbatches=8, split=False),
        Case(seed=4, ranks=4, microbatches=8, split=True),
        Case(seed=5, ranks=3, microbatches=4, split=False),
    ],
    ids=["vit", "transformer", "u-net"],
)
def test_our_plan_is_better_than_the_best_of_the_others(case):
    row = row_of(case)
    assert row.problems == ()
    assert row.ratio < 0.99
    if row.split is not None:
        assert row.split_ratio <= row.ratio
