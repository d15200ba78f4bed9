"""Graph breaks and models that cannot be captured: as one plain process computes, pipelined or whole on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import run_command, run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "breaks_run.py"
LIMIT_S = 400

JOINED = (
    "graph break", "print and logger", "skipped helper", "many pieces", "tied", "loss inside", "rows in Python",
    "branch", "item",
)  # fmt: skip
WHOLE = ("picked rows", "lstm", "gru")
ON_THREE = ("many pieces", "lstm")


class Runs:
    """Records of one plain process and of launches, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors: dict[int, str] = {}

    def plain(self, name: str) -> dict[str, Any]:
        folder = self.folder / "1"
        if not folder.exists():
            folder.mkdir()
            environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ACCELERATE_USE_CPU": "true"}
            command = [sys.executable, str(SCRIPT), str(folder), *JOINED, *WHOLE]
            run_command(command, env=environment, timeout=LIMIT_S).check()
        return torch.load(folder / f"{name}.plain.pt")

    def ranks(self, name: str, size: int) -> list[dict[str, Any]]:
        folder = self.folder / str(size)
        if not folder.exists():
            folder.mkdir()
            names = (*JOINED, *WHOLE) if size == 2 else ON_THREE
            environment = {"PFEIFE_ENABLED": "true", "PFEIFE_NUM_MICROBATCHES": "4"}
            result = run_ranks(
                SCRIPT, num_processes=size, args=(str(folder), *names), env=environment, timeout=LIMIT_S
            ).check()
            self.errors[size] = result.stderr
        return [torch.load(folder / f"{name}.{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("breaks"))


CASES = [(2, name) for name in (*JOINED, *WHOLE)] + [(3, name) for name in ON_THREE]


@pytest.mark.parametrize(("size", "name"), CASES)
def test_losses_gradients_and_state_are_those_of_one_process(runs, size, name):
    plain = runs.plain(name)
    found = runs.ranks(name, size)
    seen: set[str] = set()
    for records in found:
        close = {"rtol": 1e-10, "atol": 1e-12}
        for key in ("losses", "norms", "evaluation"):
            torch.testing.assert_close(torch.tensor(records[key]), torch.tensor(plain[key]), **close)
        for key in records["gradients"]:
            torch.testing.assert_close(records["gradients"][key], plain["gradients"][key], **close)
        torch.testing.assert_close(records["state"], plain["state"], **close)
        torch.testing.assert_close(records["drawn"], plain["drawn"], rtol=0, atol=0)
        assert torch.equal(records.get("generated", torch.empty(0)), plain.get("generated", torch.empty(0)))
        assert records["is pipelined"] == (name in JOINED)
        seen |= set(records["gradients"])
    assert seen == set(plain["gradients"])


def test_each_model_that_is_not_pipelined_is_told_once_with_its_line(runs):
    runs.ranks("picked rows", 2)
    error = runs.errors[2]
    assert error.count("is not pipelined: every process of a pipeline trains the whole model by itself") == len(WHOLE)
    assert "[(h.sum(-1) > 0).flatten()]" in error
    assert error.count("on_capture_failure: error, to refuse such a model") == len(WHOLE)
    assert "a size of the batch passes through Python code between two captured pieces" in error


HEAD = """
import copy, os, sys
import torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import set_seed

rank = int(os.environ["RANK"])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.often, self.seldom = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, branch=True):
        h = self.first(x)
        if branch and len(h[h.sum(-1) > 0]) > len(h) / 2:
            return self.often(h)
        if branch:
            return self.seldom(h)
        return self.often(torch.tanh(h))

"""

REPLICAS = (
    HEAD
    + """
accelerator = Accelerator(mixed_precision=sys.argv[1], gradient_accumulation_steps=2)
set_seed(1)
model = Branching()
plain = copy.deepcopy(model)
model = accelerator.prepare(model)
assert accelerator.num_processes == 2
# Each pipeline takes another branch: what one leaves unused, the other has gradients for.
parts = [[torch.full((4, 8), 1.0), torch.full((4, 8), -1.0)], [torch.full((4, 8), 2.0), torch.full((4, 8), -0.5)]]
sums = [plain.first(part).sum().item() for part in parts[0]]
assert (sums[0] > 0) != (sums[1] > 0), sums
for step in range(2):
    with accelerator.accumulate(model):
        out = model(parts[step][rank])
        assert out.dtype == torch.float32
        accelerator.backward(out.square().mean())
for part in (*parts[0], *parts[1]):
    with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] == "bf16"):
        out = plain(part)
    (out.float().square().mean() / 4).backward()
for (name, mine), wanted in zip(model.named_parameters(), plain.parameters()):
    torch.testing.assert_close(mine.grad, wanted.grad, msg=name, rtol=1e-5, atol=1e-6)
if accelerator.is_main_process:  # an evaluation on one process alone waits for nobody
    with torch.no_grad():
        model(parts[0][0])
print("same on", rank, flush=True)
"""
)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_pipelines_average_the_gradients_of_a_model_that_is_not_pipelined(precision):
    environment = {"PFEIFE_PIPELINE_SIZE": "1"}
    result = run_ranks(REPLICAS, num_processes=2, args=(precision,), env=environment, timeout=LIMIT_S).check()
    assert result.lines("same on") == ["same on 0", "same on 1"]


AFTERWARDS = (
    HEAD
    + """
accelerator = Accelerator()
set_seed(1)
model = Branching()
plain = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
x = torch.randn(4, 8)
accelerator.backward(model(x, branch=False).square().mean())
assert any(p.is_meta for p in model.parameters())
with torch.no_grad():
    torch.testing.assert_close(model(x), plain(x))
accelerator.wait_for_everyone()
print("evaluated", rank, flush=True)
model(x)
"""
)


def test_a_branch_that_is_first_met_later_can_be_evaluated_and_not_trained():
    result = run_ranks(AFTERWARDS, num_processes=2, env={"PFEIFE_ENABLED": "true"}, timeout=LIMIT_S)
    assert result.lines("evaluated") == ["evaluated 0", "evaluated 1"], result.report()
    assert result.returncode not in (0, None)
    assert "PF510 Branching cannot be captured: earlier calls could be" in result.stderr
    assert "if branch and len(h[h.sum(-1) > 0]) > len(h) / 2:" in result.stderr
    assert result.stderr.count("an evaluation is run on the whole model") == 1


FAULTS = (
    HEAD
    + """
import pfeife_accelerate.session.unpipelined as unpipelined

fault = sys.argv[1]
accelerator = Accelerator()
set_seed(1)
if fault == "memory":
    unpipelined.memory_bytes = lambda device: 1000
model = Branching()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(12):
    x = torch.full((4, 8), 1.0 + step)
    if fault == "data" and rank == 1:
        x[0, 0] = 7
    if fault == "drift" and step == 2 and rank == 1:
        with torch.no_grad():
            model.first.bias[0] += 1
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.wait_for_everyone()
print("trained", rank, flush=True)
"""
)


def run_fault(fault: str, **options: str):
    environment = {"PFEIFE_ENABLED": "true", **options}
    return run_ranks(FAULTS, num_processes=2, args=(fault,), env=environment, timeout=LIMIT_S)


def test_copies_that_drift_apart_are_told():
    result = run_fault("drift").check()
    assert result.lines("trained") == ["trained 0", "trained 1"]
    assert result.stderr.count("the copies of Branching on ranks 1 and 0 are no longer the same") == 1
    assert "first.bias" in result.stderr


def test_different_data_on_the_ranks_is_refused():
    result = run_fault("data")
    assert result.returncode not in (0, None)
    assert "PF531 ranks 1 and 0 of one pipeline were given different batches" in result.stderr


def test_a_model_that_does_not_fit_into_one_process_is_refused_by_bytes():
    result = run_fault("memory")
    assert result.returncode not in (0, None)
    # Three layers of 72 float32 numbers: gradients and two moments are to come, the parameters are there already.
    missing = 3 * 72 * 4 * 3 - 1000 // 2
    wanted = f"PF530 Branching cannot be captured, and does not fit into one process: {missing:,} bytes are missing"
    assert wanted in result.stderr, result.report()


def test_refusal_can_be_asked_for():
    result = run_fault("none", PFEIFE_ON_CAPTURE_FAILURE="error")
    assert result.returncode not in (0, None)
    assert "PF510 Branching cannot be captured" in result.stderr
    assert "if branch and len(h[h.sum(-1) > 0]) > len(h) / 2:" in result.stderr
