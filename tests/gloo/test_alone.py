"""A call of the model that only one process makes: a validation on the main process while the others wait."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SCRIPT = """
import sys
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()
if "first" in sys.argv:  # the last stage, and with it the loss, on the main process
    from pfeife_accelerate import session
    running = session.current()
    follow = running.follow_plan
    running.follow_plan = lambda plan: follow(plan.with_swapped(0, plan.num_ranks - 1))
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
x = torch.randn(6, 8)
if accelerator.is_main_process:
    with torch.no_grad():
        print("before the first step", model(x).shape == (6, 8), flush=True)
accelerator.wait_for_everyone()
for step in range(3):
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process:
        with torch.no_grad():
            alone = accelerator.unwrap_model(model)(x)
            assert model(x[:2]).shape == (2, 8)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        together = model(x)
    if accelerator.is_main_process:
        torch.testing.assert_close(alone, together)
        print("same at step", step, flush=True)
x = torch.randn(6, 8)
if accelerator.is_main_process:
    with torch.no_grad():
        print("before a step", model(x).shape == (6, 8), flush=True)
accelerator.backward(model(x).square().mean())
print("trained", flush=True)
if "train" in sys.argv:
    if accelerator.is_main_process:
        print(model(x).mean().item())
    accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("loss_on", ["first", "last"])
def test_a_validation_on_the_main_process_alone_gives_what_all_get_together(loss_on: str):
    env = {"PFEIFE_ENABLED": "true"}
    result = run_ranks(SCRIPT, num_processes=3, args=(loss_on,), env=env, timeout=120).check()
    assert [line for line in result.stdout.splitlines() if line.startswith("same")] == [
        f"same at step {step}" for step in range(3)
    ]
    assert result.lines("before") == ["before a step True", "before the first step True"]
    assert len(result.lines("trained")) == 3


@pytest.mark.parametrize("loss_on", ["first", "last"])
def test_a_call_with_gradients_on_one_process_alone_is_refused_and_does_not_hang(loss_on: str):
    env = {"PFEIFE_ENABLED": "true"}
    result = run_ranks(SCRIPT, num_processes=2, args=("train", loss_on), env=env, timeout=120)
    assert result.returncode not in (0, None)
    assert result.stderr.count("PF431 the model was called on one process of the pipeline only") >= 1
    assert "call it under torch.no_grad() if it is an evaluation" in result.stderr
