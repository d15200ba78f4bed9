"""Processes that start without importing: children of a process that has done it, one such parent for each rank.

Models: `subprocess.Popen` for Python scripts, with process number, exit code and a session of its own.
Ignores: standard input. A parent for each rank, and not one for all: ranks must differ in the order of their sets,
which Python draws anew in each process that is really started, and in the places of their objects.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).parent / "scripts" / "forking.py"
# Libraries read these while they are imported; whoever needs them to differ needs a process of its own.
_READ_BY_IMPORTS = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "HF_", "CUDA_", "LD_")


_PARENTS: dict[int, _Parent] = {}


class Fork:
    """A running script."""

    def __init__(self, parent: _Parent, pid: int) -> None:
        self.pid = pid
        self._parent = parent
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self._code is None:
            self._code = self._parent.ask({"poll": self.pid})["code"]
        return self._code

    def wait(self) -> int:
        """The exit code, when it has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code


class _Parent:
    """A process that imports once and forks on request; ends when its input does."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)],
            env=self.environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self._end)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        asked.write(json.dumps(request).encode() + b"\n")
        asked.flush()
        line = answers.readline()
        assert line, f"the process that forks has ended with code {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a script with this environment runs in a fork as it does in a fresh process.

    Not where there are CUDA devices, which a child cannot use once its parent has looked at them.
    """
    if sys.platform != "linux" or any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    return _settled(environment) == _settled(_clean())


def start(rank: int, arguments: Sequence[str], environment: Mapping[str, str], *, stdout: Path, stderr: Path) -> Fork:
    """Run the script and arguments `arguments` as this rank; what it prints is added to the two files."""
    assert can_fork(environment)
    parent = _parent(rank)
    request = {
        "arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd(),
        "stdout": str(stdout), "stderr": str(stderr),
    }  # fmt: skip
    return Fork(parent, parent.ask(request)["pid"])


def _parent(rank: int) -> _Parent:
    # The parents of a usual run import side by side.
    for number in {0, 1, 2, rank} - _PARENTS.keys():
        _PARENTS[number] = _Parent(_clean())
    return _PARENTS[rank]


def _clean() -> dict[str, str]:
    from tests.launching import environment

    return environment()


def _settled(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS)}
