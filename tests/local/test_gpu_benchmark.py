"""`zoo/benchmarks/gpu.py` on small members: on CPUs always, on a GPU where there is one."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from pfeife_accelerate.ir import read_cost_file
from tests.launching import run_command

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from gpu import Losses, run
from gpu_costs import Costs, costs

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).resolve().parents[2] / "zoo" / "benchmarks" / "gpu.py"


def _run(tmp_path: Path, *words: str) -> dict[str, list]:
    command = ["python", str(SCRIPT), "--tiny", "--out", str(tmp_path), *words]
    run_command(command, timeout=280).check()
    assert (tmp_path / "table.md").is_file()
    found: dict[str, list] = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [one["problem"] for one in found["losses"]] == ["", ""]
    return found


def test_losses_agree_or_do_not():
    assert Losses(model="x", plain=(2.0, 1.0), pipelined=(2.0, 1.0001)).agree
    assert not Losses(model="x", plain=(2.0, 1.0), pipelined=(2.0, 1.01)).agree
    assert not Losses(model="x", plain=(), pipelined=(), problem="2 process(es): no time left").agree


def test_what_takes_too_long_is_ended_and_its_words_count(tmp_path):
    code = "import time; print('costs so far', flush=True); time.sleep(100)"
    (said,) = run([[sys.executable, "-S", "-c", code]], [{}], 3.0, tmp_path)
    assert said == "costs so far\n"


def test_what_runs_is_ended_with_who_waits_for_it(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"

    def interrupt(*_: object) -> None:
        if pid_file.exists() and pid_file.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run([[sys.executable, "-S", "-c", code]], [{}], 60.0, tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_small_model_is_measured_and_written(tmp_path):
    found = costs("llama2-7b-tiny", "fp32", torch.device("cpu"), 20.0, tmp_path)
    graph, machine = read_cost_file(tmp_path / found.file)
    assert found.kinds_measured > 0 and found.forward_flops > 0
    assert graph.work_s == pytest.approx(found.forward_s + found.backward_s)
    assert machine.device_of(0).action_s > 0
    assert len(found.cells()) == len(Costs.columns())


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
