"""fp16 on GPUs, as Accelerate sets it: one scale, one overflow decision. On CPUs: the fidelity cases `scaler_*`."""

from __future__ import annotations

import pytest
import torch

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.gpu, pytest.mark.timeout(300)]

SCRIPT = """
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
torch.manual_seed(0)
model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": 1024.0, "growth_interval": 2})
found = []
for step in range(6):
    x, y = torch.randn(2, 8, 64, device=accelerator.device)
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    if step == 2 and model[0].weight.grad is not None:
        model[0].weight.grad[0, 0] = float("inf")
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    found.append((optimizer.step_was_skipped, accelerator.scaler.get_scale(), bool(norm.isfinite())))
print(f"found {found}\\n", end="", flush=True)
"""


def test_all_ranks_skip_the_same_steps_and_keep_one_scale():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU for each rank")
    lines = run_ranks(SCRIPT, num_processes=2, env={"PFEIFE_ENABLED": "true"}, timeout=240).check().lines("found")
    scales = [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
    expected = [(step == 2, scale, step != 2) for step, scale in enumerate(scales)]
    assert lines == [f"found {expected}"] * 2
