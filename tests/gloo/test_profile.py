"""`pfeife profile`: the script's own model is measured, and the script ends there."""

from __future__ import annotations

import json
import sys

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import read_cost_file
from pfeife_accelerate.tools.profile import profile
from tests.launching import run_command

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(150)]

SCRIPT = """
import sys
import torch
from torch import nn
from accelerate import Accelerator

def say(text):
    sys.stdout.write(text + "\\n")  # at once: the launcher's processes share a pipe and do not buffer
    sys.stdout.flush()

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
model[0][0].weight.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)
if "train" not in sys.argv:
    sys.exit(0)
with torch.no_grad():
    say(f"evaluated {model(torch.randn(8, 64)).shape}")
try:
    for _ in range(3):
        accelerator.backward(model(torch.randn(8, 64)).square().mean())
        say("not reached")
        optimizer.step()
finally:
    say("left")
"""


def run(script, folder, *arguments):
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "pfeife_accelerate.tools.cli", "profile", "--out", str(folder / "cost.json.gz")]
    env = {
        "PFEIFE_NUM_MICROBATCHES": "2",
        "ACCELERATE_USE_CPU": "true",
        "PFEIFE_CACHE_DIR": str(folder / "cache"),
    }
    return run_command([*command, *arguments[:-1], str(path), arguments[-1]], env=env, timeout=120)


def test_a_script_is_measured_up_to_its_first_training_call(tmp_path):
    result = run(SCRIPT, tmp_path, "--processes", "2", "train").check()
    assert len(result.lines("evaluated")) == len(result.lines("left")) == 2
    assert not result.lines("not reached")
    assert "failed" not in result.stderr and "Traceback" not in result.stderr
    for text in (
        "Sequential, one micro-batch",
        "linear",
        "tanh",
        "all",
        "link, each way",
        "optimizer state",
        "written:",
    ):
        assert text in result.stdout

    graph, machine = read_cost_file(tmp_path / "cost.json.gz")
    assert [node.op for node in graph.nodes] == ["linear", "tanh"] * 4
    assert all(node.forward_s > 0 and node.backward_s > 0 for node in graph.nodes)
    frozen, trained = (sum(use.state_bytes for use in graph.nodes[index].params) for index in (0, 2))
    bias, weight = 64 * 4, 64 * 64 * 4
    assert frozen == weight + 3 * bias and trained == 3 * (weight + bias)  # parameter, gradient, momentum
    assert all(value.num_bytes == 4 * 64 * 4 for value in graph.values)  # half of eight rows
    assert not machine.device_of(0).runs_ahead and machine.device_of(0).action_s > 0
    assert machine.link.bytes_per_s > 1e6 and machine.device_of(0).memory_bytes > 1e6

    kept = {path.name.split("-")[0]: json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*.json")}
    assert set(kept) == {"links", "operations"}
    assert 3 <= len(kept["operations"]["entries"]) < len(graph.nodes)  # equal layers are measured once


def test_a_script_that_does_not_train_is_told_so(tmp_path):
    result = run(SCRIPT, tmp_path, "--processes", "1", "stop")
    assert result.returncode == 2
    assert "PF233" in result.stderr and "ended without a training call of a prepared model" in result.stderr
    assert not (tmp_path / "cost.json.gz").exists()


def test_files_that_are_not_there_are_named_before_anything_starts(tmp_path):
    with pytest.raises(PfeifeError, match=r"PF234 the script .*train\.py does not exist"):
        profile(tmp_path / "train.py", [], out=tmp_path / "cost.json")
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(PfeifeError, match=r"PF234 the configuration .*pfeife\.yaml does not exist"):
        profile(script, [], out=tmp_path / "cost.json", config=tmp_path / "pfeife.yaml")
    with pytest.raises(PfeifeError, match=r"PF234 the folder .*nowhere does not exist"):
        profile(script, [], out=tmp_path / "nowhere" / "cost.json")
