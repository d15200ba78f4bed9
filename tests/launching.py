"""Run scripts in processes of their own, with a hard time limit: a hang is a failure, and nothing is left behind."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.forks import Fork, can_fork
from tests.forks import start as fork

# What the surrounding shell or CI may have set must not reach the script under test.
_FOREIGN = ("PFEIFE_", "ACCELERATE_", "TORCHELASTIC_", "MASTER_")
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_DEVICE_BACKEND_AUTOLOAD")


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended. `returncode` is None when it was stopped by the time limit."""

    returncode: int | None
    stdout: str
    stderr: str
    wall_s: float

    def lines(self, prefix: str = "") -> list[str]:
        """Lines of stdout that start with `prefix`, sorted: ranks print in any order."""
        return sorted(line for line in self.stdout.splitlines() if line.startswith(prefix))

    def check(self) -> Result:
        """This result, or an assertion that shows the whole output of a run that failed or hung."""
        assert self.returncode == 0, self.report()
        return self

    def report(self) -> str:
        """The whole run as text."""
        state = "hung (time limit)" if self.returncode is None else f"exit code {self.returncode}"
        return f"{state} after {self.wall_s:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run_script(
    script: Path | str,
    *,
    num_processes: int = 1,
    config: Mapping[str, Any] | None = None,
    args: Sequence[str] = (),
    launch_args: Sequence[str] = (),
    config_option: str = "--config",
    env: Mapping[str, str | None] | None = None,
    timeout: float = 120,
    fresh: bool = True,
) -> Result:
    """Run `script` (a path, or its text) by `accelerate launch` with a yaml made of `config`.

    `config` is laid over a plain configuration of `num_processes` CPU processes; None: launched without a yaml. Unless
    `fresh`, the launcher itself, but none of the processes that it starts, is forked as ranks are by `run_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = _script_path(script, Path(folder))
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        if config is None:
            command += ["--cpu", "--num_processes", str(num_processes)]
        else:
            yaml_file = Path(folder) / "config.yaml"
            base = {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "MULTI_CPU",
                "num_machines": 1,
                "num_processes": num_processes,
                "main_process_port": free_port(),
                "mixed_precision": "no",
            }
            yaml_file.write_text(yaml.safe_dump({**base, **config}), encoding="utf-8")
            command += [config_option, str(yaml_file)]
        command += [*launch_args, str(path), *args]
        return _run([command], [environment(env)], timeout=timeout, fresh=fresh)


def run_ranks(
    script: Path | str,
    *,
    num_processes: int,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    timeout: float = 120,
    fresh: bool = False,
) -> Result:
    """Run `script` in `num_processes` Python processes with the variables torchrun sets, without torchrun.

    They are forked from processes that have imported torch, accelerate and the package, if they can be, unless `fresh`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = _script_path(script, Path(folder))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
        environments = [
            environment(
                {
                    **shared,
                    "LOCAL_WORLD_SIZE": str(num_processes),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    **(env or {}),
                }
            )
            for rank in range(num_processes)
        ]
        command = [sys.executable, str(path), *args]
        return _run([command] * num_processes, environments, timeout=timeout, fresh=fresh)


def run_command(
    command: Sequence[str], *, env: Mapping[str, str | None] | None = None, timeout: float = 120, fresh: bool = True
) -> Result:
    """Run any command under the same rules; one of Python may be forked, unless `fresh`."""
    return _run([list(command)], [environment(env)], timeout=timeout, fresh=fresh)


def environment(env: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment without what launchers leave in it, plus `env`, where None unsets a variable."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    given = env or {}
    # A wrong rule of the loss algebra must end a test, not be made good.
    strict = {"PFEIFE_ON_LOSS_MISMATCH": "error"} if any(name.startswith("PFEIFE_") for name in given) else {}
    # What is measured in one test serves the next, and neither reads nor changes what the person has.
    clean["XDG_CACHE_HOME"] = _cache_home()
    fixed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    wanted = {**clean, **fixed, **strict, **given}
    return {name: value for name, value in wanted.items() if value is not None}


@functools.cache
def _cache_home() -> str:
    folder = tempfile.mkdtemp(prefix="pfeife-tests-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _script_path(script: Path | str, folder: Path) -> Path:
    if isinstance(script, Path):
        return script
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    return path


def start(
    rank: int, command: Sequence[str], env: Mapping[str, str], *, stdout: Path, stderr: Path, fresh: bool
) -> subprocess.Popen[bytes] | Fork:
    """Start a process that leads a session and adds what it prints to two files.

    `command` is an interpreter with a script or `-m` module and arguments, or, if `fresh`, any command.
    """
    if not fresh and can_fork(env):
        return fork(rank, command[1:], env, stdout=stdout, stderr=stderr)
    with stdout.open("ab") as out_file, stderr.open("ab") as err_file:
        # A session of its own: its whole process group can be killed, launchers' children included.
        return subprocess.Popen(command, env=dict(env), stdout=out_file, stderr=err_file, start_new_session=True)


def _run(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, timeout: float, fresh: bool
) -> Result:
    """Run all commands at once; the first failure ends the others, the time limit ends all."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder) / f"{number}.out", Path(folder) / f"{number}.err") for number in range(len(commands))]
        processes = []
        try:
            for rank, (command, env, (out, err)) in enumerate(zip(commands, environments, outputs, strict=True)):
                processes.append(start(rank, command, env, stdout=out, stderr=err, fresh=fresh))
            start_s = time.monotonic()
            returncode = _wait(processes, deadline_s=start_s + timeout)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = [(out.read_text(errors="replace"), err.read_text(errors="replace")) for out, err in outputs]
    return Result(
        returncode=returncode,
        stdout="".join(text for text, _ in texts),
        stderr="".join(text for _, text in texts),
        wall_s=time.monotonic() - start_s,
    )


def _wait(processes: Sequence[subprocess.Popen[bytes] | Fork], *, deadline_s: float, grace_s: float = 15) -> int | None:
    """The first failing exit code, 0 when all succeed, None at the deadline.

    After a failure the others get `grace_s` to notice, because ending by themselves is what is tested.
    """
    failure: int | None = None
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in processes]
        if failure is None:
            failure = next((code for code in codes if code), None)
            if failure is not None:
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
        if all(code is not None for code in codes):
            return failure or 0
        time.sleep(0.02)
    return failure
