"""A split loss that is wrong is noticed in its first step, which is exact nevertheless."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = pytest.mark.gloo

SCRIPT = """
import copy, os, torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator()
set_seed(0)
from pfeife_accelerate.capture.loss import SplitLoss

right = SplitLoss.run
factor = float(os.environ["WRONG_BY"])
SplitLoss.run = lambda self, *args: tuple(part * factor for part in right(self, *args))

model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
model = model.double()
plain = copy.deepcopy(model)
model = accelerator.prepare(model)
for step in range(3):
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    for number in range(2):  # gradients that are there already stay
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.functional.mse_loss(plain(x), y).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
    print("right", step, round(loss.item(), 12) == round(nn.functional.mse_loss(plain(x), y).item(), 12), flush=True)
"""


ENVIRONMENT = {"PFEIFE_NUM_MICROBATCHES": "4", "ACCELERATE_USE_CPU": "true"}


def test_a_wrong_split_ends_the_run_where_that_is_wanted():
    env = {**ENVIRONMENT, "PFEIFE_ON_LOSS_MISMATCH": "error", "WRONG_BY": "1.01"}
    result = run_ranks(SCRIPT, num_processes=2, env=env)
    assert result.returncode not in (0, None)
    assert "PF543 computed a micro-batch at a time, the loss differs from the whole batch's" in result.stderr


@pytest.mark.parametrize(("wrong_by", "warnings"), [("1.01", 1), ("1.0", 0)])
def test_a_wrong_split_is_said_once_and_the_exact_order_is_taken(wrong_by: str, warnings: int):
    result = run_ranks(
        SCRIPT,
        num_processes=2,
        env={**ENVIRONMENT, "PFEIFE_ON_LOSS_MISMATCH": "fallback", "WRONG_BY": wrong_by},
    ).check()
    assert result.lines("right") == sorted(f"right {step} True" for step in range(3) for _ in range(2))
    assert result.stderr.count("differs from the whole batch's") == warnings, result.report()
