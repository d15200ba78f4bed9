"""Trainable tensors outside the pipelined model that take part in the loss get their gradients on every rank."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SCRIPT = """
import copy
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
head, side, scale = nn.Linear(8, 3), nn.Linear(5, 8), nn.ParameterDict({"t": nn.Parameter(torch.tensor(2.0))})
plain = copy.deepcopy([body, head, side, scale])
body = accelerator.prepare(body)
for rows in (8, 1):  # several micro-batches, and one
    x, z, y = torch.randn(rows, 8), torch.randn(rows, 5), torch.randint(0, 3, (rows,))
    for b, h, s, t in (plain, [body, head, side, scale]):
        loss = nn.functional.cross_entropy(h(b(x) + s(z)) * t["t"], y)
        accelerator.backward(loss)
    for mine, wanted in zip([body, head, side, scale], plain):
        for p, q in zip(mine.parameters(), wanted.parameters()):
            if not p.is_meta:
                torch.testing.assert_close(p.grad, q.grad)
print("done", flush=True)
"""


def test_a_head_a_side_branch_and_a_temperature_train_on_every_rank():
    result = run_ranks(SCRIPT, num_processes=3, env={"PFEIFE_ENABLED": "true"}, timeout=120).check()
    assert result.stdout.count("done") == 3
    assert "does not separate" not in result.stderr
