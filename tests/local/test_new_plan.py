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
    asked: list[tuple[str, int]] = []

    def plan_within(effort: str, most_bytes: int) -> PipelinePlan:
        asked.append((effort, most_bytes))
        return replace(fastest, estimate_s=1.01, peak_bytes=(most_bytes, most_bytes))

    assert leanest(plan_within, fastest).peak_bytes == (500, 500)
    assert asked == [("quick", 500), ("full", 500)]


@pytest.mark.parametrize(("slower", "expected"), [((1.2, 1.01), (850, 850)), ((1.2, 1.05), (1000, 900))])
def test_what_is_slower_is_not_taken(fastest, slower, expected):
    def plan_within(effort: str, most_bytes: int) -> PipelinePlan:
        return replace(fastest, estimate_s=slower[most_bytes > 800], peak_bytes=(most_bytes, most_bytes))

    assert leanest(plan_within, fastest).peak_bytes == expected


def test_memory_into_which_nothing_fits_is_no_error_and_other_errors_are(fastest):
    def nothing(effort: str, most_bytes: int) -> PipelinePlan:
        raise PfeifeError(id="PF302", what="no plan fits")

    def wrong(effort: str, most_bytes: int) -> PipelinePlan:
        raise PfeifeError(id="PF210", what="impossible")

    assert leanest(nothing, fastest) is fastest
    with pytest.raises(PfeifeError, match="PF210"):
        leanest(wrong, fastest)
