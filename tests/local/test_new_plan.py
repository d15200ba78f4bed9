"""Of plans that are about as fast, the runtime takes the one with less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import PipelinePlan
from pfeife_accelerate.planner import SearchOptions, pipeline_plan
from pfeife_accelerate.planner.search import make_plan
from pfeife_accelerate.session.new_plan import leanest
from tests.cost_graphs import chain, machine

pytestmark = pytest.mark.local


@pytest.fixture(scope="module")
def fastest() -> PipelinePlan:
    options = SearchOptions(schedule="1f1b", effort="quick")
    plan = pipeline_plan(make_plan(chain(4), machine(), 2, 2, options))
    return replace(plan, estimate_s=1.0, peak_bytes=(1000, 900))


def test_the_least_memory_that_costs_next_to_nothing_is_taken(fastest):
    """As soon as 600 bytes are there, plans are fast; a bisection needs no more than three plans to know it closely."""
    asked: list[int] = []

    def plan_within(most_bytes: int) -> PipelinePlan:
        asked.append(most_bytes)
        return replace(fastest, estimate_s=1.01 if most_bytes >= 600 else 1.2, peak_bytes=(most_bytes, most_bytes))

    assert 600 <= max(leanest(plan_within, fastest).peak_bytes) <= 660
    assert len(asked) == 3


def test_a_plan_that_needs_less_than_it_may_is_searched_below(fastest):
    def plan_within(most_bytes: int) -> PipelinePlan:
        return replace(fastest, estimate_s=1.01 if most_bytes >= 450 else 1.2, peak_bytes=(450, 450))

    assert leanest(plan_within, fastest).peak_bytes == (450, 450)


def test_nothing_is_searched_below_a_plan_that_needs_hardly_anything(fastest):
    asked: list[int] = []

    def plan_within(most_bytes: int) -> PipelinePlan:
        asked.append(most_bytes)
        return replace(fastest, estimate_s=1.0, peak_bytes=(300, 300))

    assert leanest(plan_within, fastest).peak_bytes == (300, 300)
    assert len(asked) == 1


def test_what_is_slower_is_not_taken(fastest):
    def plan_within(most_bytes: int) -> PipelinePlan:
        return replace(fastest, estimate_s=1.05, peak_bytes=(most_bytes, most_bytes))

    assert leanest(plan_within, fastest) is fastest


def test_memory_into_which_nothing_fits_is_no_error_and_other_errors_are(fastest):
    def nothing(most_bytes: int) -> PipelinePlan:
        raise PfeifeError(id="PF302", what="no plan fits")

    def wrong(most_bytes: int) -> PipelinePlan:
        raise PfeifeError(id="PF210", what="impossible")

    assert leanest(nothing, fastest) is fastest
    with pytest.raises(PfeifeError, match="PF210"):
        leanest(wrong, fastest)
