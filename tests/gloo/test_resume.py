"""`save_state` and `load_state`: the next losses are those of the run that was not interrupted, on other ranks too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import Result, run_ranks, run_script
from tests.orders import turn_into_a_v

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

SCRIPT = """
import sys
import torch
from torch import nn
from accelerate import Accelerator

mode, folder = sys.argv[1:]
accelerator = Accelerator()
torch.manual_seed(0 if mode == "save" else 1)  # what is loaded must not depend on how the model was made
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
batches = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(5))
first = 0
if mode == "load":
    accelerator.load_state(folder)
    first = 4
for step in range(first, 8):
    noise = torch.randn(6, 8)  # from the generator whose state is saved
    loss = (model(batches[step]) - noise).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step >= 4:
        accelerator.print("loss", repr(loss.item()), scheduler.get_last_lr()[0], flush=True)
    if mode == "save" and step == 3:
        accelerator.save_state(folder)
state = accelerator.get_state_dict(model)
accelerator.print("loss", repr(sum(value.abs().sum().item() for value in state.values())), flush=True)
own = [p for p in model.parameters() if not p.is_meta]
assert set(optimizer.optimizer.state) == set(own)
"""


def _numbers(result: Result) -> list[float]:
    """Losses and learning rates in the order of the steps."""
    lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("loss")]
    return [float(word) for line in lines for word in line]


def test_a_run_resumes_under_another_plan_on_more_ranks_and_without_the_package(tmp_path: Path):
    folder, plan_file = str(tmp_path / "state"), tmp_path / "plan.json"
    env = {"PFEIFE_SCHEDULE": "gpipe", "PFEIFE_NUM_LOOPS": "2"}
    planned = {**env, "PFEIFE_PLAN_FILE": str(plan_file)}
    saved = run_ranks(SCRIPT, num_processes=2, args=("save", folder), env=planned, timeout=90).check()
    wanted = _numbers(saved)
    assert len(wanted) == 9
    plan = json.loads(plan_file.read_text())
    turn_into_a_v(plan)  # the loss, and the first stage with it, are on the first rank from here on
    plan_file.write_text(json.dumps(plan))
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}
    for size in (2, 3):
        options = planned if size == 2 else env
        resumed = run_ranks(SCRIPT, num_processes=size, args=("load", folder), env=options, timeout=90).check()
        assert _numbers(resumed) == pytest.approx(wanted, rel=1e-5)
    plain = run_script(SCRIPT, args=("load", folder), timeout=90).check()
    assert _numbers(plain) == pytest.approx(wanted, rel=1e-5)
