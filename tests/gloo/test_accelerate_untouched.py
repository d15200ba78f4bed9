"""With the package installed and no section, Accelerate passes its own test script and keeps its own functions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.launching import run_ranks, run_script

pytestmark = pytest.mark.gloo


def own_test_script() -> Path:
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "test_utils" / "scripts" / "test_script.py"


def test_accelerates_own_script_passes_in_one_process():
    result = run_script(
        own_test_script(), num_processes=1, config={"distributed_type": "NO", "use_cpu": True}, timeout=280
    )
    assert "Training integration test" in result.check().stdout or "Training" in result.stdout


def test_accelerates_own_script_passes_in_two_processes():
    run_ranks(own_test_script(), num_processes=2, env={"ACCELERATE_USE_CPU": "true"}, timeout=280, fresh=True).check()


def test_only_the_launcher_and_the_keyword_are_in():
    script = """
import inspect, sys
from accelerate import Accelerator, PartialState
from pfeife_accelerate.integration import seams
groups = sorted({seam.when.name for seam in seams.installed()})
assert groups == ["ALWAYS", "LAUNCH"], groups
assert inspect.getattr_static(PartialState, "is_main_process").fget.__module__ == "accelerate.state"
assert not hasattr(PartialState.__init__, "__wrapped__")
heavy = [name for name in sys.modules if name.startswith("pfeife_accelerate.")]
assert not any("session" in name or "runtime" in name or "capture" in name for name in heavy), heavy
Accelerator(cpu=True)
"""
    run_script(script, num_processes=1, config={"distributed_type": "NO", "use_cpu": True}).check()
