"""`training_scripts/compare.py`: which configurations can run, what is quoted, and how it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.launching import run_command
from tests.training_scripts import CONFIGS, FOLDER, load

pytestmark = [pytest.mark.local, pytest.mark.timeout(200)]

compare, generate = load("compare.py"), load("configs/generate.py")


def test_a_configuration_without_its_engine_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    absent: set[str] = set()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    absent |= {"deepspeed", "pfeife_accelerate"}
    reasons = {name: compare.missing(CONFIGS / f"{name}.yaml", o) for name, o in generate.configurations().items()}
    assert reasons["plain_cpu"] is reasons["ddp_cpu2"] is reasons["ddp_gpu4_fp16"] is reasons["fsdp2_gpu2_fp32"] is None
    assert reasons["fsdp2_gpu8_fp16"] == "needs 8 CUDA devices, there are 4"
    assert reasons["zero3_gpu2_fp16"] == "deepspeed is not installed"
    assert reasons["pfeife_cpu2"] == reasons["pfeife_gpu2_fp16"] == "pfeife_accelerate is not installed"


def test_repeats_take_turns_and_medians_are_quoted(tmp_path, monkeypatch, capsys):
    other = tmp_path / "other.yaml"
    other.write_text((CONFIGS / "plain_cpu.yaml").read_text())
    speeds = {"plain_cpu": [10.0, 30.0, 11.0], "other": [5.0, 5.5, 90.0]}
    order = []

    def run(path, options, script, script_args, folder, timeout):
        order.append(path.stem)
        assert (script, script_args, timeout) == (tmp_path / "train.py", ["--lr=1"], None)
        summary = {"items_per_s": speeds[path.stem][int(folder.name)], "tokens_per_s": None}
        records = [{"kind": "step", "step": step, "loss": 2.0 / step} for step in (1, 2)]
        records += [{"kind": "summary", "peak_memory_bytes": [5, 2**30], **summary}]
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return "ok"

    monkeypatch.setattr(compare, "run", run)
    (tmp_path / "train.py").write_text("")
    arguments = [str(tmp_path / "train.py"), "--configs", "plain_cpu", str(other)]
    arguments += ["--repeats=3", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, "--", "--lr=1"])
    compare.main()
    assert order == ["plain_cpu", "other"] * 3
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    assert [(row["items_per_s"], row["relative_speed"]) for row in rows] == [(11, 1), (5.5, 0.5)]
    for row in rows:
        assert (row["peak_memory_bytes"], row["last_loss"], row["loss_difference"]) == (2**30, 1, 0)
    line = "| other | 1 | 5.5 | 0.50x |  | 1.00 GiB | 1.0000 | 0.0e+00 |"
    assert line in (tmp_path / "out" / "compare.md").read_text() and line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        ("raise RuntimeError('no such thing')", "failed, see ", 1),
        ("raise MemoryError('CUDA out of memory. Tried to allocate 4 GiB')", "out of memory", 0),
        ("import time; time.sleep(60)", "took longer than 3 s", 1),
    ],
)
def test_a_run_that_fails_is_a_line_of_the_table(line, status, code, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(line)
    command = [sys.executable, str(FOLDER / "compare.py"), str(script), "--configs", "plain_cpu"]
    timeout = ["--timeout=3"] if "sleep" in line else []
    result = run_command([*command, f"--out={tmp_path}", *timeout])
    (row,) = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert result.returncode == code and row["status"].startswith(status), result.report()
    assert status in result.stdout
    if code and not timeout:
        assert "no such thing" in Path(row["status"].removeprefix(status)).read_text()


STARTED = """
import os, sys, time
open(f"{sys.argv[1]}/{os.environ['RANK']}.pid", "w").write(str(os.getpid()))
time.sleep(300)
"""


def test_an_interrupted_comparison_leaves_no_process_behind(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STARTED)
    command = [sys.executable, str(FOLDER / "compare.py"), str(script), "--configs", "ddp_cpu2"]
    command += [f"--out={tmp_path / 'out'}", "--", str(tmp_path)]
    # What a shell starts in the background ignores interrupts, and so do all it starts.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=heard)
    try:
        files = [tmp_path / f"{rank}.pid" for rank in range(2)]
        while not all(file.is_file() and file.read_text() for file in files):
            assert process.poll() is None
            time.sleep(0.1)
        started = [int(file.read_text()) for file in files]
        process.send_signal(signal.SIGINT)
        assert process.wait(90) != 0
        for pid in started:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        process.kill()
        for file in tmp_path.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "text", "why"),
    [
        (["--repeats=0"], None, "0 is not above 0"),
        (["--timeout=-1"], None, "-1 is not above 0"),
        ([], "", "is no configuration of Accelerate: it does not say distributed_type and num_processes"),
        ([], "num_processes: 1", "is no configuration of Accelerate"),
        ([], "{a: [", "is not YAML: "),
        (["--configs", "plain_cpu", "plain_cpu"], None, "--configs: plain_cpu twice"),
    ],
)
def test_a_comparison_refuses_what_cannot_be_meant(arguments, text, why, tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "own.yaml").write_text((CONFIGS / "plain_cpu.yaml").read_text() if text is None else text)
    command = [sys.executable, str(FOLDER / "compare.py"), str(tmp_path / "train.py")]
    result = run_command([*command, "--configs", str(tmp_path / "own.yaml"), *arguments, f"--out={tmp_path}"])
    assert result.returncode in (1, 2) and why in result.stderr and "Traceback" not in result.stderr, result.report()


def test_a_script_is_compared_anew_and_one_without_records_has_failed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    command = [sys.executable, str(FOLDER / "compare.py"), str(script), "--configs", "plain_cpu", f"--out={tmp_path}"]
    earlier = tmp_path / "runs" / "plain_cpu" / "0" / "checkpoints"
    earlier.mkdir(parents=True)
    result = run_command(command)
    assert result.returncode == 1 and "failed, it wrote no " in result.stdout, result.report()
    assert not earlier.exists()
    script.unlink()
    assert f"{script}: no such file" in run_command(command).stderr


def test_loss_curves_are_compared_where_both_have_a_step():
    assert compare.largest_difference({1: 2.0, 2: 1.1, 3: 9.0}, {1: 2.0, 2: 1.0}) == pytest.approx(0.1)
    assert compare.largest_difference({}, {1: 2.0}) is None
