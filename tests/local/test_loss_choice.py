"""How a loss is computed is worked out once for each kind of loss; a number that changes makes no new kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pfeife_accelerate.capture.expression import Expression, extract
from pfeife_accelerate.capture.loss import Rows
from pfeife_accelerate.session import loss_choice
from pfeife_accelerate.session.loss_choice import LossChooser
from tests.loss_harness import F64, deferred

pytestmark = pytest.mark.local
B = 4
X = torch.linspace(-2, 2, B * 3, dtype=F64).view(B, 3)


def by_microbatches(chooser: LossChooser, expression: Expression, x: torch.Tensor) -> torch.Tensor:
    planned = chooser.choose(expression, B, 2).split
    assert planned is not None
    values = planned.prepare(expression.constants, expression.numbers)
    parts = [planned.run([x[i : i + 2]], values, Rows(start=i, count=2))[0] for i in (0, 2)]
    return planned.total(0, parts)


LOSSES = {
    "factor": lambda x, a: F.mse_loss(x, x.detach() * 0.5) * a,
    "factor_from_the_left": lambda x, a: a * x.mean(),
    "terms": lambda x, a: a - (x + a).square().mean() / a + a,
    "divided": lambda x, a: (a / (x.square() + 1)).mean() - a,
    "two_numbers": lambda x, a: x.mean() * a + x.square().mean() * (1 - a),
    "numbers_on_constants_too": lambda x, a: (x * (torch.ones(B, 1, dtype=F64) * a)).mean() * a,
    "the_same_number_twice": lambda x, a: (x * a * a).mean() + a * 0.25,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [F64, torch.float16])
def test_an_annealed_number_is_not_another_loss(name, dtype, monkeypatch):
    work, calls = loss_choice.split, []
    monkeypatch.setattr(loss_choice, "split", lambda *args: calls.append(1) or work(*args))
    chooser, x = LossChooser(), X.to(dtype)
    for step in range(3):
        number = 0.3 * 0.998**step
        expression = extract(LOSSES[name](deferred(x), number))
        expected, found = LOSSES[name](x, number), by_microbatches(chooser, expression, x)
        assert found.dtype == expected.dtype
        tolerance = 1e-12 if dtype is F64 else 4e-3
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert len(calls) == 1


def test_the_choices_kept_are_bounded():
    chooser = LossChooser()
    for i in range(loss_choice._MOST_KNOWN + 5):
        chooser.choose(extract(F.softplus(deferred(X), beta=1 + i).mean()), B, 2)
    assert len(chooser._known) == loss_choice._MOST_KNOWN


def test_a_loss_that_was_used_last_is_kept(monkeypatch):
    monkeypatch.setattr(loss_choice, "_MOST_KNOWN", 2)
    chooser = LossChooser()
    often = chooser.choose(extract(deferred(X).mean()), B, 2)
    for i in range(4):
        chooser.choose(extract(F.softplus(deferred(X), beta=1 + i).mean()), B, 2)
        assert chooser.choose(extract(deferred(X).mean()), B, 2) is often


def test_a_loss_that_mixes_rows_is_said_once_with_its_line(caplog):
    chooser = LossChooser()
    for _ in range(2):
        choice = chooser.choose(extract((deferred(X).mean(0) ** 2).sum().sqrt()), B, 2)
        assert not choice.separable and choice.split is None
    (message,) = [m for m in caplog.messages if "the loss does not separate over micro-batches" in m]
    assert "because of" in message and "test_loss_choice.py:" in message
    assert "Gradients are exact" in message
