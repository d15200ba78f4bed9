"""`pfeife doctor` says what is installed, what is patched, and whether two processes can talk."""

from __future__ import annotations

import sys

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools import doctor
from tests.launching import run_command

pytestmark = pytest.mark.local

PFEIFE = (sys.executable, "-m", "pfeife_accelerate.tools.cli")


def test_doctor_prints_everything_and_passes():
    result = run_command([*PFEIFE, "doctor"], env={"COLUMNS": "200", "PFEIFE_VERBOSE": "1"}, timeout=120).check()
    for word in (
        "torch",
        "accelerate",
        "gloo",
        "PartialState.__init__",
        "as known",
        "PFEIFE_VERBOSE",
        "passed, latency",
    ):
        assert word in result.stdout, result.report()


def test_doctor_fails_on_options_that_are_not_understood():
    env = {"COLUMNS": "200", "PFEIFE_VERBOS": "1"}
    result = run_command([*PFEIFE, "doctor", "--no-self-test"], env=env, timeout=120, fresh=False)
    assert result.returncode == 1, result.report()
    assert "did you mean 'PFEIFE_VERBOSE'" in result.stdout


def test_version():
    result = run_command([*PFEIFE, "--version"], timeout=60).check()
    assert result.stdout.startswith("pfeife_accelerate 0.")


def test_self_test_gives_up_at_the_limit():
    result = doctor.self_test(limit_s=0.01)
    assert not result.passed
    assert "no answer within" in result.message


def test_a_self_test_that_receives_something_else_says_what(monkeypatch):
    for name in ("init_process_group", "send", "recv"):  # a connection that delivers nothing
        monkeypatch.setattr(doctor.dist, name, lambda *_, **__: None)
    with pytest.raises(PfeifeError, match=r"PF130 rank 0 received 0\.0, expected 8\.0$"):
        doctor._exchange(0, 0, rounds=3)
