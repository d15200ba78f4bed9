"""Random numbers that one rank alone draws: saving draws none, and what would be trained on different noise is refused.

The story: a script's hook on saving made the moving average's model on the main process, which draws its first weights.
From then on the ranks drew different noise, and trained on it without a word.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import Result, run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

SCRIPT = """
import random, sys
import numpy as np
import torch
from torch import nn
from accelerate import Accelerator

mode, folder = sys.argv[1:]
accelerator = Accelerator()
torch.manual_seed(0); np.random.seed(0); random.seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)

def save(models, weights, output_dir):
    if accelerator.is_main_process:
        nn.Linear(3, 3)
        random.random(), np.random.rand()

accelerator.register_save_state_pre_hook(save)
fixed = torch.randn(6, 8)
draw = lambda: torch.rand(1)
draws = {"torch": draw, "harmless": draw, "numpy": np.random.rand, "random": random.random}
for step in range(8):
    noise = fixed if mode == "harmless" else torch.randn(6, 8) + np.random.rand() + random.random()
    loss = (model(noise) - 1).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("loss", step, repr(loss.item()), flush=True)
    if step == 4 and mode == "all save":
        accelerator.save_state(folder)
    if step == 4 and mode == "one saves" and accelerator.is_main_process:
        accelerator.save_state(folder)
    if step == 4 and mode in draws and accelerator.is_main_process:
        draws[mode]()
print("done", flush=True)
"""


def run(mode: str, folder: Path, *, num_ranks: int) -> Result:
    env = {"PFEIFE_ENABLED": "true"} if num_ranks > 1 else {"ACCELERATE_USE_CPU": "true"}
    return run_ranks(SCRIPT, num_processes=num_ranks, args=(mode, str(folder)), env=env, timeout=60)


def losses(result: Result) -> list[float]:
    return [float(line.split()[2]) for line in result.lines("loss")]


@pytest.mark.parametrize("mode", ["all save", "one saves", "harmless"])
def test_saving_draws_nothing_and_what_is_not_used_does_no_harm(tmp_path: Path, mode: str):
    plain = run("harmless" if mode == "harmless" else "nothing", tmp_path, num_ranks=1).check()
    found = run(mode, tmp_path / "state", num_ranks=2).check()
    assert losses(found) == pytest.approx(losses(plain), rel=1e-5)
    assert len(losses(found)) == 8 and found.lines("done") == ["done"] * 2


@pytest.mark.parametrize("mode", ["torch", "numpy", "random"])
def test_noise_that_differs_between_ranks_is_refused_however_late(tmp_path: Path, mode: str):
    result = run(mode, tmp_path, num_ranks=3)
    assert result.returncode not in (0, None), result.report()
    assert "of one pipeline were given different batches (1 of 1 tensors differ)" in result.stderr, result.report()
    assert "call number 7 of the model" in result.stderr
    assert "give it a generator of its own" in result.stderr
    assert len(losses(result)) == 5
