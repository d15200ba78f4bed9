"""`pfeife zoo bench`: real processes, plain against pipelined."""

from __future__ import annotations

import re
import sys

import pytest

from tests.launching import run_command

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

BENCH = (sys.executable, "-m", "pfeife_accelerate.tools.cli", "zoo", "bench")


def test_both_train_the_same_and_take_turns():
    words = ("--rows", "4", "--seq", "16", "--microbatches", "2", "--steps", "4", "--threads", "1", "--device", "cpu")
    result = run_command([*BENCH, "llama2-7b-tiny", *words], env={"COLUMNS": "120"}, timeout=200).check()
    assert "llama2-7b-tiny, 4 rows, fp32" in result.stdout
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [(row[0], row[1]) for row in rows] == [("plain", "1"), ("pipelined", "2")]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 and "iB" in row[4] for row in rows), result.stdout
    assert re.search(r"ratio    \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d in 4 rounds\)", result.stdout), result.stdout
    (off,) = re.findall(r"losses   of 7 steps differ by at most (\S+), relative", result.stdout)
    assert float(off) < 1e-5
    assert "plan     " in result.stdout and "2 micro-batches" in result.stdout


def test_a_process_that_fails_ends_the_command_with_what_it_said():
    words = ("--resolution", "30", "--steps", "1", "--device", "cpu")  # the patches are 7 pixels wide
    result = run_command([*BENCH, "vit-g14-tiny", *words], timeout=200)
    assert result.returncode == 2 and result.stderr.startswith("PF159 the plain training failed on rank 0: it ended")
    assert "Input height (30) doesn't match model (28)" in result.stderr and result.stderr.count("Traceback") <= 1
