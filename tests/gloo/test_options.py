"""Options that change the plan: as a keyword in the script, a kept plan, and cuts chosen by the user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import Result, run_ranks
from tests.orders import turn_into_a_v

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

SCRIPT = """
import sys
import torch
from torch import nn
from accelerate import Accelerator
from pfeife_accelerate import PfeifePlugin

width, plugin = int(sys.argv[1]), eval(sys.argv[2])
accelerator = Accelerator(pfeife_plugin=plugin)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


model = accelerator.prepare(Net())
loss = model(torch.randn(8, width)).square().mean()
accelerator.backward(loss)
held = [name for name, p in model.named_parameters() if not p.is_meta]
print(f"held {held}\\n", end="", flush=True)  # one write: ranks share a pipe
accelerator.print("loss", f"{loss.item():.6f}", flush=True)
from pfeife_accelerate import session
spec = session.current().models[0].plan.spec
accelerator.print("spec", spec.family.value, spec.num_microbatches, spec.num_loops, flush=True)
"""


def _run(width: int, plugin: str) -> Result:
    return run_ranks(SCRIPT, num_processes=2, args=(str(width), plugin), timeout=90)


def test_the_keyword_of_accelerator_sets_the_plan_and_a_trace_of_nothing_is_told(tmp_path: Path):
    file = tmp_path / "trace.json"
    options = f"num_microbatches=3, schedule='looped', num_loops=2, trace={str(file)!r}"
    result = _run(8, f"PfeifePlugin({options})").check()
    assert "spec looped 3 2" in result.stdout
    assert result.stderr.count(f"no step was recorded into {file}") == 1
    assert "the script ran 1 planned training step(s), and the first to be recorded is number 3" in result.stderr
    assert not file.exists()


def test_a_plan_is_kept_in_the_plan_file_used_again_and_refused_for_another_model(tmp_path: Path):
    plan_file = tmp_path / "plan.json"
    plugin = f"PfeifePlugin(plan_file={str(plan_file)!r}, schedule='gpipe', num_loops=2)"
    first = _run(8, plugin).check()
    text = plan_file.read_text()
    assert json.loads(text)["version"] == 2
    moved = json.loads(text)
    turn_into_a_v(moved)
    moved["cuts"] = [2, 4, 8]  # of twelve operations, two a block
    plan_file.write_text(json.dumps(moved))
    second = _run(8, plugin).check()
    assert second.lines("loss") == first.lines("loss") != [], "another plan gives the same"
    assert second.lines("held") == [
        f"held {[f'blocks.{i}.{kind}' for i in numbers for kind in ('weight', 'bias')]}"
        for numbers in ((0, 4, 5), (1, 2, 3))
    ], "the file is followed, not made anew"
    assert second.lines("spec") == first.lines("spec")
    del moved["per_rank"][0][0]
    plan_file.write_text(json.dumps(moved))
    assert "PF202 stage 0 runs B for micro-batch 0, expected F B" in _run(8, plugin).stderr
    split = json.loads(text)
    split["recompute"] = [0, 3]
    split["per_rank"] = [
        [part for a in actions for part in ([a.replace("B", "I"), a.replace("B", "W")] if "B" in a else [a])]
        for actions in split["per_rank"]
    ]
    plan_file.write_text(json.dumps(split))
    assert _run(8, plugin).check().lines("loss") == first.lines("loss"), "halves apart and recomputed stages are run"
    plan_file.write_text(json.dumps({**json.loads(text), "copied_values": ["linear"]}))
    assert f"PF174 the plan in {plan_file} has each stage compute 'linear' anew" in _run(8, plugin).stderr
    moved["cuts"] = [2, 8, 4]
    plan_file.write_text(json.dumps(moved))
    refused = _run(8, plugin).stderr
    assert "PF224" in refused and "cuts the graph's 12 operations at [2, 8, 4]" in refused, refused
    plan_file.write_text(text)
    other = _run(16, plugin)
    assert other.returncode not in (0, None)
    assert "PF223" in other.stderr
    assert "was made for another model, batch size or version" in other.stderr


def test_a_plan_is_kept_in_the_cache_unless_that_is_not_wanted(tmp_path: Path):
    def run(option: str) -> Result:
        env = {"XDG_CACHE_HOME": str(tmp_path), "PFEIFE_VERBOSE": "1"}
        return run_ranks(SCRIPT, num_processes=2, args=("8", f"PfeifePlugin({option})"), env=env, timeout=90).check()

    plans = tmp_path / "pfeife_accelerate" / "plans"
    assert "is used" not in run("plan_cache=False").stderr
    assert not plans.exists()
    made = run("")
    (kept,) = plans.iterdir()
    text = kept.read_text()
    assert [f"{number} micro-batches: " in made.stderr for number in (2, 4, 8, 16)] == [True, True, True, False]
    used = run("")
    assert f"the plan kept in {kept} is used" in used.stderr
    assert "micro-batches: " not in used.stderr, "nothing is measured"
    assert (used.lines("spec"), kept.read_text()) == (made.lines("spec"), text)


def test_split_points_decide_where_the_second_stage_starts():
    result = _run(8, "PfeifePlugin(split_points=['blocks.2'], schedule='1f1b')").check()
    held = sorted(line for line in result.stdout.splitlines() if line.startswith("held"))
    assert held == [
        f"held {[f'blocks.{i}.{kind}' for i in numbers for kind in ('weight', 'bias')]}"
        for numbers in (range(2), range(2, 6))
    ]


def test_an_unknown_split_point_is_refused_with_the_nearest_name():
    result = _run(8, "PfeifePlugin(split_points=['block.2'], schedule='1f1b')")
    assert result.returncode not in (0, None)
    assert "did you mean" in result.stderr
