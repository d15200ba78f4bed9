"""Optimizers that add up over all parameters in their step: refused at the first step, and not silently wrong."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SCRIPT = """
import sys
import torch
from torch import nn
from accelerate import Accelerator

class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)

class Strange(torch.optim.SGD):
    def step(self, closure=None):
        assert self.param_groups[0]["params"][0].shape == (6, 6)
        return super().step(closure)

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
optimizer = {"Clipped": Clipped, "Strange": Strange}[sys.argv[1]](model.parameters(), lr=0.1)
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(2):
    accelerator.backward(model(torch.randn(8, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


def _run(kind: str):
    return run_ranks(SCRIPT, num_processes=2, args=(kind,), env={"PFEIFE_ENABLED": "true"}, timeout=100)


def test_an_optimizer_that_limits_the_norm_of_all_gradients_is_refused():
    result = _run("Clipped")
    assert result.returncode not in (0, None)
    assert "PF528 the optimizer Clipped cannot train a pipelined model" in result.stderr
    assert "switch that off and call accelerator.clip_grad_norm_ before" in result.stderr


def test_an_optimizer_that_cannot_be_tried_out_is_told_and_used():
    result = _run("Strange").check()
    assert result.stdout.count("done") == 2
    warning = "Strange is taken to treat each parameter by itself; that could not be tried out: AssertionError"
    assert warning in result.stderr
