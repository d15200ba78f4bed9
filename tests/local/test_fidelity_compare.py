"""The comparison behind the fidelity table notices what it is there to notice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from fidelity_compare import Tolerance, compare

pytestmark = pytest.mark.local

PLAIN: dict[str, Any] = {"loss": [1.0, 2.0], "gradients": [{"a": torch.ones(3), "b": torch.full((2,), 4.0)}]}
ALLOWED = Tolerance(1e-6, 1e-5)


def ranks(**second: Any) -> list[dict[str, Any]]:
    """What two ranks recorded: each its own part of the gradients; `second` changes what the second one did."""
    return [
        {"loss": [1.0, 2.0], "gradients": [{"a": torch.ones(3)}]},
        {"loss": [1.0, 2.0], "gradients": [{"b": torch.full((2,), 4.0)}], **second},
    ]


def test_equal_records_have_no_problems_and_an_error_of_zero():
    found = compare(PLAIN, ranks(), ALLOWED)
    assert (found.problems, found.gradient_error, found.loss_error) == ([], 0.0, 0.0)


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"gradients": [{"b": torch.full((2,), 4.01)}]}, "b on rank 1: relative error 0.0025"),
        ({"gradients": [{}]}, "no rank has ['b']"),
        ({"gradients": [{"b": torch.full((2,), 4.0), "c": torch.ones(1)}]}, "c on rank 1: there is none"),
        ({"gradients": [{"b": torch.full((2,), float("nan"))}]}, "b on rank 1: relative error inf"),
        ({"loss": [1.0, 2.1]}, "loss on rank 1, record 1: 2.1 instead of 2.0"),
        ({"loss": [1.0, float("nan")]}, "nan instead of 2.0"),
        ({"loss": [3.0]}, "3.0 is not what one process read"),
        ({"more": [1]}, "more: only ranks recorded it"),
    ],
)
def test_what_differs_is_named(second: dict[str, Any], problem: str):
    problems = compare(PLAIN, ranks(**second), ALLOWED).problems
    assert any(problem in found for found in problems), problems


def test_a_rank_may_have_read_some_of_the_values():
    assert not compare(PLAIN, ranks(loss=[2.0]), ALLOWED).problems
