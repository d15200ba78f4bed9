"""Losses that take rows together keep the planned schedule; custom functions take the exact order; gradients agree."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SCRIPT = """
import copy
import torch
import torch.nn.functional as F
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
body = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()
plain = copy.deepcopy(body)
body = accelerator.prepare(body)
x, target, weights = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 5, 6), (8, 5, 6), (4,)))
mask = torch.rand(8, 5) > 0.5


def dpo(y):
    chosen, rejected = y.mean((1, 2)).chunk(2)
    return -F.logsigmoid(chosen - rejected - 0.1 * weights).mean()


def dreambooth(y):
    (a, prior), (b, prior_target) = y.chunk(2), target.chunk(2)
    rows = F.mse_loss(a, b, reduction="none").mean((1, 2))
    return (rows * weights.exp()).mean() + 0.7 * F.mse_loss(prior, prior_target)


def guidance(y):
    conditional, unconditional = y[:4], y[4:]
    return F.mse_loss(unconditional + 3 * (conditional - unconditional), target[:4])


def interleaved(y):
    return -F.logsigmoid(y[0::2, 0, 0] - y[1::2, 0, 0]).mean() + F.mse_loss(y, target)


def masked(y):
    return F.smooth_l1_loss(y[mask], target[mask])


def row_by_row(y):
    loss = 0
    for i in range(len(y)):
        loss = loss + F.cross_entropy(y[i], target[i].argmax(-1))
    return loss / len(y)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, scale):
        ctx.scale = scale
        ctx.save_for_backward(y)
        return (y * scale).round(), y.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, of_sum):
        (y,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return gradient * ctx.scale * (y > 0) + of_sum, None


def custom(y):
    rounded, total = Rounded.apply(y, 4.0)
    return F.mse_loss(rounded, target) + 0.01 * total


for loss_of in (dpo, dreambooth, guidance, interleaved, masked, row_by_row, custom):
    plain_output = plain(x)
    plain_loss = loss_of(plain_output)
    plain_loss.backward()
    output = body(x)
    loss = loss_of(output)
    accelerator.backward(loss)
    assert abs(loss.item() - plain_loss.item()) < 1e-12
    seen, wanted = (torch.tensor(y.sum((1, 2)).tolist()) for y in (output, plain_output))
    torch.testing.assert_close(seen, wanted)
    for p, q in zip(body.parameters(), plain.parameters()):
        if p.device.type != "meta":
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
        p.grad = q.grad = None
    print("done", loss_of.__name__, flush=True)
"""


@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_losses_over_rows_taken_together_are_those_of_one_process(microbatches):
    env = {"PFEIFE_ENABLED": "true", "PFEIFE_NUM_MICROBATCHES": str(microbatches)}
    result = run_ranks(SCRIPT, num_processes=2, env=env, timeout=120).check()
    assert result.stdout.count("done") == 2 * 7
    refusals = [line for line in result.stderr.splitlines() if "does not separate" in line]
    assert len(refusals) == 1 and "Rounded, a torch.autograd.Function" in refusals[0]


INSIDE = """
import copy
import torch
import torch.nn.functional as F
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()


class WithLoss(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.kind = kind

    def forward(self, x):
        y = self.body(x)
        half = len(y) // 2
        if self.kind == "halves":
            chosen, rejected = y.mean(-1).chunk(2)
            return -F.logsigmoid(chosen - rejected).mean(), y
        if self.kind == "slices":
            return F.mse_loss(y[:half], y[half:]), y
        return F.cross_entropy(y[:, 0].view(-1, 2), torch.zeros(half, dtype=torch.long)), y


for kind in ("halves", "slices", "choices"):
    torch.manual_seed(0)
    model = WithLoss(kind).double()
    plain = copy.deepcopy(model)
    model = accelerator.prepare(model)
    x = torch.randn(8, 6, dtype=torch.float64)
    (wanted, _), (loss, output) = plain(x), model(x)
    wanted.backward()
    accelerator.backward(loss)
    assert abs(loss.item() - wanted.item()) < 1e-12 and len(output.tolist()) == 8
    for p, q in zip(model.parameters(), plain.parameters()):
        if p.device.type != "meta":
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    print("done", kind, flush=True)
"""


def test_a_loss_inside_the_model_may_take_rows_together_too():
    env = {"PFEIFE_ENABLED": "true", "PFEIFE_NUM_MICROBATCHES": "4"}
    result = run_ranks(INSIDE, num_processes=2, env=env, timeout=120).check()
    assert result.stdout.count("done") == 2 * 3
    assert "does not separate" not in result.stderr
