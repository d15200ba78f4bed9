"""Start processes that run cases: one plain process, or the ranks of a pipeline, with time limits.

Models: many cases in one launch, since starting costs more than a case; a case that fails or hangs ends its launch, is
noted with the reason, and the rest is launched anew; results that the folder has are not made again. Ignores: what the
cases record.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from fidelity_kit import CASES, Case

_HERE = Path(__file__).parent
# What the surrounding shell or CI may have set must not reach the processes.
_FOREIGN = ("PFEIFE_", "ACCELERATE_", "TORCHELASTIC_", "MASTER_")
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_START_LIMIT_S = 120.0
_GRACE_S = 15.0
_CASES_PER_LAUNCH = 60  # captured graphs pile up in a process


Process: TypeAlias = Any
"""A running process: its `pid`, its exit code by `poll` or None, and `wait` for its end."""
Start: TypeAlias = Callable[[int, Sequence[str], Mapping[str, str], Path], Process]
"""Start a rank: its number, command and environment, and the file that takes what it prints."""


def start_fresh(rank: int, command: Sequence[str], env: Mapping[str, str], output: Path) -> Process:
    """A process of its own, in a session of its own."""
    with output.open("w") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)


@dataclass
class Launches:
    """Results of chosen cases in `folder`: a launch for each number of processes and kind, when first asked."""

    folder: Path
    chosen: Sequence[Case]
    case_limit_s: float = 300.0
    start: Start = start_fresh
    """How a process is started."""
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    """Why a case has no result, by its name and number of processes."""
    logs: dict[tuple[int, str], str] = field(default_factory=dict)
    """What the processes printed, by their number and the kind of launch."""
    wall_s: dict[tuple[int, str], float] = field(default_factory=dict)

    def records(self, case: Case, size: int) -> list[dict[str, object]] | None:
        """What each rank recorded, or None: then `failures` says why."""
        self._run(size, case.launch)
        return self._read(case.name, size)

    def plain(self, case: Case) -> dict[str, object] | None:
        """What one process without the package recorded, or None."""
        self._run(1, case.launch)
        name = self._plain_names(case.launch)[case.plain]
        found = self._read(name, 1)
        if found is None:
            self.failures.setdefault((case.name, 1), self.failures.get((name, 1), "no result"))
        return None if found is None else found[0]

    def _plain_names(self, launch: str) -> dict[str, str]:
        return {case.plain: case.name for case in reversed(self.chosen) if case.launch == launch}

    def _read(self, name: str, size: int) -> list[dict[str, object]] | None:
        files = [self.folder / str(size) / f"{name}.{rank}.pt" for rank in range(size)]
        if not all(file.exists() for file in files):
            return None
        return [torch.load(file, weights_only=True) for file in files]

    def _run(self, size: int, launch: str) -> None:
        if (size, launch) in self.logs:
            return
        (self.folder / str(size)).mkdir(exist_ok=True, parents=True)
        chosen = [c for c in self.chosen if c.launch == launch]
        if size == 1:
            wanted = set(self._plain_names(launch).values())
            names = [c.name for c in chosen if c.name in wanted]
        else:
            names = [c.name for c in chosen if size in c.ranks]
        names = [name for name in names if self._read(name, size) is None]
        start_s, logs = time.monotonic(), []
        while names:
            some, later = names[:_CASES_PER_LAUNCH], names[_CASES_PER_LAUNCH:]
            log = self._launch(size, launch, some)
            logs.append(log)
            names = [*self._rest(some, size, log), *later]
        self.logs[size, launch] = "\n".join(logs)
        self.wall_s[size, launch] = time.monotonic() - start_s

    def _launch(self, size: int, launch: str, names: Sequence[str]) -> str:
        args = [str(self.folder / str(size)), launch, str(self.case_limit_s), *names]
        limit_s = _START_LIMIT_S + self.case_limit_s * len(names)
        return run_processes([sys.executable, str(_HERE / "fidelity_worker.py"), *args], size, limit_s, self.start)

    def _rest(self, names: Sequence[str], size: int, log: str) -> list[str]:
        """The cases after the one that failed; its reason is noted."""
        left = [name for name in names if self._read(name, size) is None]
        if left:
            self.failures[left[0], size] = reason_in(log)
            (self.folder / str(size) / f"{left[0]}.log").write_text(log, encoding="utf-8")
        return left[1:]


def choose(*, quick: bool, ranks: Sequence[int], pattern: str, pending: bool) -> list[Case]:
    """The cases to run, each with the numbers of ranks to run it on."""
    from dataclasses import replace

    found = []
    for case in CASES.values():
        sizes = tuple(size for size in case.ranks if size in ranks)
        if sizes and not (quick and case.slow) and re.search(pattern, case.name) and (pending or not case.pending):
            found.append(replace(case, ranks=sizes))
    return found


def reason_in(log: str) -> str:
    """One line that says why processes ended."""
    lines = [line.strip() for line in log.splitlines()]
    for pattern in (r"PF\d{3}[: ]", r"Timeout \(", r"^[\w.]*(Error|Exception|Refused)\b"):
        found = [line for line in lines if re.search(pattern, line)]
        if found:
            return ("hangs: " if "Timeout" in found[0] else "") + found[0][:300]
    return lines[-1][:300] if lines else "no output"


def run_processes(command: Sequence[str], size: int, limit_s: float, start: Start = start_fresh) -> str:
    """Run the command as one plain process, or as that many ranks; all that they print, the errors last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[Process] = []
    outputs: list[Path] = []
    for rank in range(size):
        own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ACCELERATE_USE_CPU": "true"}
        if size > 1:
            own = {"PFEIFE_ON_LOSS_MISMATCH": "error", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}
            own |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "XDG_CACHE_HOME": str(Path(command[2]) / "cache")}
        outputs.append(Path(command[2]) / f"log.{rank}")
        processes.append(start(rank, command, _environment(own), outputs[-1]))
    try:
        _wait(processes, time.monotonic() + limit_s)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "".join(path.read_text(errors="replace") for path in outputs)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    clean = {n: v for n, v in os.environ.items() if not n.startswith(_FOREIGN) and n not in _FOREIGN_NAMES}
    return {**clean, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **own}


def _wait(processes: Sequence[Process], deadline_s: float) -> None:
    """Until all have ended; after a failure the others get a moment to notice."""
    failed = False
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return
        if not failed and any(codes):
            failed = True
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        time.sleep(0.02)
