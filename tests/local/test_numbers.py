"""How many micro-batches: what may be chosen from, which is chosen, and what becomes of it for other batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.session.numbers import MicrobatchNumber, candidates, fastest, rows_of

pytestmark = pytest.mark.local


def _call(rows: int, *, refusal: str | None = None, batch_norm: bool = False) -> Any:
    return SimpleNamespace(batch_size=rows, graph=SimpleNamespace(refusal=refusal, has_batch_statistics=batch_norm))


def _plan(number: int, estimate_s: float = 1.0, num_ranks: int = 2) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(num_microbatches=number), estimate_s=estimate_s, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (_call(64), (4, 2, 8, 16)),
        (_call(6), (4, 2, 6)),
        (_call(3), (3, 2)),
        (_call(1), (1,)),
        (_call(12, batch_norm=True), (4, 2, 6)),
        (_call(64, refusal="rows are mixed"), (1,)),
    ],
)
def test_candidates_are_multiples_of_the_ranks_that_the_batch_allows(call: Any, wanted: tuple[int, ...]):
    assert candidates(PfeifePlugin(), call, 2) == wanted


def test_the_option_is_obeyed():
    plugin = PfeifePlugin(num_microbatches=5)
    assert candidates(plugin, _call(64), 2) == (5,)
    assert candidates(plugin, _call(3), 2) == (3,)
    number = MicrobatchNumber.planned(plugin, _plan(3), _call(3))
    assert [number.of(_call(rows)) for rows in (64, 5, 2)] == [5, 5, 2]


def test_the_plans_number_holds_for_later_batches_and_is_less_for_short_ones():
    number = MicrobatchNumber.planned(PfeifePlugin(), _plan(2), _call(16))
    assert [number.of(_call(rows)) for rows in (16, 64, 1)] == [2, 2, 1]
    assert number.of(_call(64, refusal="rows are mixed")) == 1
    assert number.of(_call(3, batch_norm=True)) == 1


def test_a_plan_for_a_batch_too_short_says_nothing_about_longer_ones():
    number = MicrobatchNumber.planned(PfeifePlugin(), _plan(1), _call(1))
    assert [number.of(_call(rows)) for rows in (1, 3, 64)] == [1, 3, 4]


def test_costs_are_for_the_largest_micro_batch():
    assert [rows_of(_call(10), number) for number in (1, 3, 10, 40)] == [10, 4, 1, 1]


def test_the_fastest_number_wins_and_noise_does_not():
    times = {4: 1.0, 2: 1.3, 8: 0.97, 16: 0.8}
    chosen = fastest(lambda number, _: _plan(number, times[number]), (4, 2, 8, 16), 20.0)
    assert chosen.spec.num_microbatches == 16
    del times[16]
    assert fastest(lambda number, _: _plan(number, times[number]), (4, 2, 8), 20.0).spec.num_microbatches == 4


def test_time_to_measure_is_shared_and_runs_out():
    now, given = [100.0], {}

    def plan_for(number: int, budget_s: float) -> Any:
        given[number] = budget_s
        now[0] += 4.0
        return _plan(number, 1.0 / number)

    assert fastest(plan_for, (4, 2, 8, 16), 10.0, clock=lambda: now[0]).spec.num_microbatches == 4
    assert given == {4: 10.0, 2: 6.0}, "two seconds are left, and the first number took four"


def test_a_number_that_does_not_fit_is_passed_over():
    def plan_for(number: int, _: float) -> Any:
        if number < 8:
            raise PfeifeError(id="PF302", what=f"no plan fits with {number}")
        return _plan(number)

    assert fastest(plan_for, (4, 2, 8), 20.0).spec.num_microbatches == 8
    with pytest.raises(PfeifeError, match="no plan fits with 4"):
        fastest(plan_for, (4, 2), 20.0)


def test_an_error_that_no_other_number_mends_is_raised_at_once():
    tried = []

    def plan_for(number: int, _: float) -> Any:
        tried.append(number)
        raise PfeifeError(id="PF304", what="unknown split point 'a'")

    with pytest.raises(PfeifeError, match="PF304"):
        fastest(plan_for, (4, 2), 20.0)
    assert tried == [4]
