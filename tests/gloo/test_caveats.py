"""Models that cannot be quite what one process computes, or not in micro-batches: said once, and no crash."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SCRIPT = """
import copy
import torch
from torch import nn
from accelerate import Accelerator


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return self.layers(x)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return self.last(y - y.mean(0))


accelerator = Accelerator()
torch.manual_seed(0)
norm, centred = Norm(), Centred()
plain = copy.deepcopy(centred)
norm, centred = accelerator.prepare(norm, centred)
for rows in (8, 3, 2, 6):  # three rows on two ranks: no micro-batch may be of one row, it has no statistics
    loss = norm(torch.randn(rows, 8)).square().mean()
    accelerator.backward(loss)
    assert torch.isfinite(loss).item()

x = torch.randn(6, 8)
plain(x).square().mean().backward()
accelerator.backward(centred(x).square().mean())
for (name, parameter), wanted in zip(centred.named_parameters(), plain.parameters()):
    if not parameter.is_meta and parameter.grad is not None:
        torch.testing.assert_close(parameter.grad, wanted.grad)
accelerator.print("done")
"""


def test_each_caveat_is_said_once_and_gradients_that_can_be_exact_are():
    result = run_ranks(SCRIPT, num_processes=2, env={"PFEIFE_ENABLED": "true"}, timeout=120).check()
    assert "done" in result.stdout
    assert result.stderr.count("BatchNorm in training mode normalises each micro-batch") == 1
    assert result.stderr.count("the forward pass changes buffers (calls)") == 1
    assert result.stderr.count("the batch is not divided into micro-batches") == 1
    assert "mixes the rows of the batch" in result.stderr


VECTOR = """
import copy
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
plain = copy.deepcopy(model)
model = accelerator.prepare(model)
x, y = torch.randn(8, 8), torch.randint(0, 8, (8,))
for rows, gradient in ((8, torch.arange(8.0)), (1, torch.full((1,), 3.0))):
    for net in (plain, model):
        net.zero_grad()
        losses = nn.functional.cross_entropy(net(x[:rows]), y[:rows], reduction="none")
        losses.backward(gradient)
    for mine, wanted in zip(model.parameters(), plain.parameters()):
        if not mine.is_meta:
            torch.testing.assert_close(mine.grad, wanted.grad)
accelerator.print("done", flush=True)
"""


def test_a_loss_of_several_elements_takes_the_gradient_given_to_backward():
    assert "done" in run_ranks(VECTOR, num_processes=2, env={"PFEIFE_ENABLED": "true"}, timeout=120).check().stdout
