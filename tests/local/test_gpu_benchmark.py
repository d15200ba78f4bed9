"""`zoo/benchmarks/gpu.py` on small members: on CPUs always, on a GPU where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pfeife_accelerate.ir import read_cost_file
from tests.launching import run_command

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).resolve().parents[2] / "zoo" / "benchmarks" / "gpu.py"


def _run(tmp_path: Path, *words: str) -> dict[str, list]:
    command = ["python", str(SCRIPT), "--tiny", "--out", str(tmp_path), *words]
    run_command(command, timeout=280).check()
    assert (tmp_path / "table.md").is_file()
    found: dict[str, list] = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [one["problem"] for one in found["losses"]] == ["", ""]
    return found


@pytest.mark.slow
def test_small_members_on_cpus(tmp_path):
    found = _run(tmp_path, "--device", "cpu", "--seconds", "200", "--models", "llama2-7b")
    assert {cost["precision"] for cost in found["costs"]} >= {"fp32"}
    for cost in found["costs"]:
        assert cost["kinds_measured"] > 0
        graph, _ = read_cost_file(tmp_path / cost["file"])
        assert graph.work_s == pytest.approx(cost["forward_s"] + cost["backward_s"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_members_on_a_gpu(tmp_path):
    found = _run(tmp_path, "--device", "cuda", "--seconds", "200")
    assert {cost["precision"] for cost in found["costs"]} == {"fp16", "fp32", "bf16"}
