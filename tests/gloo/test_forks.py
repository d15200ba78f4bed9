"""A forked process is what a fresh one is: its environment, main module, output, exit code and random numbers."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.forks import can_fork
from tests.launching import environment, run_command, run_ranks

pytestmark = pytest.mark.gloo

FACTS = """
import json, os, random, sys
at_start = sorted(name for name in ("torch", "accelerate") if name in sys.modules)
import numpy, torch
from accelerate import Accelerator
from pfeife_accelerate.integration import seams

class Own:
    pass

facts = {
    "main": [__name__, sys.modules["__main__"].Own is Own, os.path.basename(__file__), sys.argv[1:]],
    "path": sys.path[0] == os.path.dirname(os.path.abspath(__file__)),
    "stdin": sys.stdin.read(),
    "environment": sorted(name for name in os.environ if name.startswith(("PFEIFE_", "RANK", "TORCH_"))),
    "leads": os.getsid(0) == os.getpgrp() == os.getpid(),
    "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
    "groups": sorted({seam.when.name for seam in seams.installed()}),
    "processes": Accelerator(cpu=True).num_processes,
}
drawn = [random.random(), float(numpy.random.rand()), torch.initial_seed()]
found = {"facts": facts, "drawn": drawn, "hash": hash("set order")}
found["imported"] = at_start
sys.stdout.write(json.dumps(found) + chr(10))
"""


def _found(*, fresh: bool, env: dict[str, str]) -> list[dict]:
    result = run_ranks(FACTS, num_processes=2, args=("one", "two"), env=env, fresh=fresh).check()
    assert result.stderr == "", result.report()
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.skipif(not can_fork(environment()), reason="nothing is forked here")
@pytest.mark.parametrize("env", [{"PFEIFE_ENABLED": "true"}, {"ACCELERATE_USE_CPU": "true"}], ids=["active", "absent"])
def test_a_forked_rank_finds_what_a_fresh_one_finds(env: dict[str, str]) -> None:
    fresh, forked, again = (_found(fresh=is_fresh, env=env) for is_fresh in (True, False, False))
    assert [found["imported"] for found in fresh + forked] == [[], [], *[["accelerate", "torch"]] * 2]
    assert [found["facts"] for found in forked] == [found["facts"] for found in fresh]
    for number in range(3):
        values = [found["drawn"][number] for found in (*fresh, *forked, *again)]
        assert len(set(values)) == len(values), "numbers that nobody seeded are never the same"
    assert forked[0]["hash"] != forked[1]["hash"], "ranks order their sets differently"


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("raise ValueError('told')", 1, "ValueError: told"),
        ("raise SystemExit(7)", 7, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import time; time.sleep(60)", None, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, ""),
    ],
)
def test_its_end_is_told(end: str, code: int | None, text: str) -> None:
    result = run_ranks(end, num_processes=1, timeout=3 if code is None else 60)
    assert result.returncode == code, result.report()
    assert text in result.stderr
    assert (code == 0) == ("at the end" in result.stdout)


def test_a_module_is_run_as_a_main_module() -> None:
    result = run_command([sys.executable, "-m", "json.tool", "--help"], fresh=False).check()
    assert "json.tool" in result.stdout and result.stderr == ""


def test_what_imports_read_cannot_be_changed_in_a_fork() -> None:
    assert not can_fork(environment({"OMP_NUM_THREADS": "3"}))
    assert not can_fork(environment({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}))
    assert can_fork(environment({"PFEIFE_ENABLED": "true"})) == can_fork(environment())
