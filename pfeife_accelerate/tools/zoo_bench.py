"""`pfeife zoo bench`: a member of the zoo trained by one plain process and by a pipeline, which take turns.

Models: a machine that is shared and drifts; both meet the same drift. A step lasts from the first rank's start to the
last rank's end. A process stands for a device: the plain one has as many threads, or GPUs, as each rank.
Ignores: data loading, and how long capturing and planning take.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pfeife_accelerate.config import PfeifePlugin, child_environment, overlay
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.launch_command import free_port
from pfeife_accelerate.tools.sizes import format_bytes
from pfeife_accelerate.tools.zoo_rank import Setting, Turn
from pfeife_accelerate.zoo import ZooModel
from pfeife_accelerate.zoo.libraries import library

__all__ = ["BenchRequest", "bench"]

_ROUNDS: Final = 5
_WARM_UP_STEPS: Final = 3  #: the first captures and plans, the second may still allocate
_LIMIT_S: Final = 600.0  #: for one answer
_LAST_LINES: Final = 12  #: of what a process that failed has printed


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The words of the command, checked."""

    num_ranks: int
    rows: int | None
    seq: int | None
    resolution: int | None
    num_microbatches: int | None
    mixed_precision: str
    num_steps: int
    device: str
    threads: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> BenchRequest:
        """What the parsed arguments ask for.

        Raises: PfeifeError PF157 for numbers below 1, PF158 for more GPUs than there are.
        """
        for name in ("ranks", "rows", "seq", "resolution", "microbatches", "steps", "threads"):
            value = vars(options)[name]
            if value is not None and value < 1:
                raise PfeifeError(id="PF157", what=f"--{name} {value}", why="it is at least 1")
        gpus = torch.cuda.device_count()
        if options.device == "cuda" and gpus < options.ranks:
            raise PfeifeError(
                id="PF158",
                what=f"{options.ranks} ranks on GPUs need as many; {gpus} found",
                where="pfeife zoo bench",
                hints=("--device cpu", f"--ranks {gpus}" if gpus > 1 else "a machine with more of them"),
            )
        on_gpus = options.device == "cuda" or (options.device == "auto" and gpus >= options.ranks)
        return cls(
            num_ranks=options.ranks,
            rows=options.rows,
            seq=options.seq,
            resolution=options.resolution,
            num_microbatches=options.microbatches,
            mixed_precision=options.mixed_precision,
            num_steps=options.steps,
            device="cuda" if on_gpus else "cpu",
            threads=options.threads or max(1, (os.cpu_count() or 1) // options.ranks),
        )


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What all processes of one side did in a turn."""

    step_s: float  #: mean
    losses: tuple[float, ...]
    peak_bytes: int | None  #: of the largest process
    plan: str | None


class _Side:
    """The processes that train one model together."""

    def __init__(self, name: str, num_ranks: int, setting: Setting, plugin: PfeifePlugin | None, folder: Path) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = [folder / f"{name}.{rank}.log" for rank in range(num_ranks)]
        port = free_port()
        for rank in range(num_ranks):
            here, there = socket.socketpair()
            command = [sys.executable, "-m", "pfeife_accelerate.tools.zoo_rank", str(there.fileno())]
            variables = _variables(rank, num_ranks, port, setting)
            with self._logs[rank].open("wb") as log, there:
                process = subprocess.Popen(
                    command,
                    env=child_environment(plugin, variables),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(there.fileno(),),
                )
            self._processes.append(process)
            self._connections.append(Connection(here.detach()))
        self._send(setting)

    def wait(self) -> None:
        """Until all have built their model."""
        self._receive()

    def turn(self, num_steps: int) -> _Round:
        """Let them do some steps."""
        self._send(num_steps)
        turns: list[Turn] = self._receive()
        start_s, end_s = min(turn.start_s for turn in turns), max(turn.ends_s[-1] for turn in turns)
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        return _Round(
            step_s=(end_s - start_s) / num_steps,
            losses=turns[0].losses,
            peak_bytes=max(peaks, default=None),
            plan=turns[0].plan,
        )

    def stop(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()

    def _send(self, message: Any) -> None:
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(message)
            except OSError as error:
                raise self._failure(rank, "it ended") from error

    def _receive(self) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(_LIMIT_S):
                raise self._failure(rank, f"no answer within {_LIMIT_S:.0f} s")
            try:
                answers.append(connection.recv())
            except (EOFError, OSError) as error:
                raise self._failure(rank, "it ended") from error
        return answers

    def _failure(self, rank: int, what: str) -> PfeifeError:
        lines = self._logs[rank].read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return PfeifeError(
            id="PF159",
            what=f"the {self.name} training failed on rank {rank}: {what}",
            where="pfeife zoo bench",
            why="\n".join(lines[-_LAST_LINES:]) or "it printed nothing",
        )


def bench(model: ZooModel, request: BenchRequest, console: Console) -> int:
    """Train, compare, print; gives the exit code.

    Raises: PfeifeError PF135 without the model's library, PF157 for a size that the model has not, PF159 if a process
    fails.
    """
    for name, wanted, own in (
        ("seq", request.seq, model.size.seq),
        ("resolution", request.resolution, model.size.resolution),
    ):
        if wanted is not None and own is None:
            raise PfeifeError(id="PF157", what=f"--{name} {wanted}", why=f"{model.name} has no such size")
    library(model.library)
    setting = Setting(
        name=model.name,
        rows=request.rows or model.size.rows,
        seq=request.seq,
        resolution=request.resolution,
        mixed_precision=request.mixed_precision,
        device=request.device,
        threads=request.threads,
    )
    with _sides(setting, request) as (plain, pipelined), console.status("starting") as status:
        for side in (plain, pipelined):
            side.wait()
        first = []
        for side in (plain, pipelined):
            status.update(f"warming up: {side.name}")
            first.append(side.turn(_WARM_UP_STEPS))
        rounds: list[tuple[_Round, _Round]] = []
        steps = [request.num_steps // _ROUNDS + (number < request.num_steps % _ROUNDS) for number in range(_ROUNDS)]
        for number, num_steps in enumerate(filter(None, steps)):
            status.update(f"round {number + 1}")
            rounds.append((plain.turn(num_steps), pipelined.turn(num_steps)))
    console.print(_table(setting, request.num_ranks, rounds))
    for line in _remarks(setting, (first[0], first[1]), rounds):
        console.print(Text(line), soft_wrap=True)
    return 0


@contextmanager
def _sides(setting: Setting, request: BenchRequest) -> Iterator[tuple[_Side, _Side]]:
    wanted = PfeifePlugin(num_microbatches=request.num_microbatches, on_capture_failure="error")
    plugin = overlay(wanted, PfeifePlugin.from_environment())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pfeife-zoo-")))
        plain = _Side("plain", 1, setting, None, folder)
        stack.callback(plain.stop)
        pipelined = _Side("pipelined", request.num_ranks, setting, plugin, folder)
        stack.callback(pipelined.stop)
        yield plain, pipelined


def _variables(rank: int, num_ranks: int, port: int, setting: Setting) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(setting.threads), "TOKENIZERS_PARALLELISM": "false"}
    if setting.device == "cpu":
        threads["ACCELERATE_USE_CPU"] = "true"
    if num_ranks == 1:
        return threads
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {
        **threads,
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _table(setting: Setting, num_ranks: int, rounds: Sequence[tuple[_Round, _Round]]) -> Table:
    precision = {"no": "fp32"}.get(setting.mixed_precision, setting.mixed_precision)
    table = Table(title=f"{setting.name}, {setting.rows} rows, {precision}")
    table.add_column("training")
    for heading in ("processes", "items/s", "ms a step", "peak memory of a process"):
        table.add_column(heading, justify="right")
    for name, number, turns in zip(("plain", "pipelined"), (1, num_ranks), zip(*rounds, strict=True), strict=True):
        step_s = median(turn.step_s for turn in turns)
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        peak = format_bytes(max(peaks)) if peaks else "not known"
        table.add_row(name, str(number), f"{setting.rows / step_s:.2f}", f"{step_s * 1e3:.1f}", peak)
    return table


def _remarks(setting: Setting, first: tuple[_Round, _Round], rounds: Sequence[tuple[_Round, _Round]]) -> list[str]:
    ratios = [plain.step_s / pipelined.step_s for plain, pipelined in rounds]
    pairs = [pair for plain, pipelined in (first, *rounds) for pair in zip(plain.losses, pipelined.losses, strict=True)]
    off = max(abs(ours - theirs) / max(abs(theirs), 1e-12) for theirs, ours in pairs)
    each = "a GPU" if setting.device == "cuda" else f"{setting.threads} thread(s)"
    return [
        f"ratio    {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds); "
        f"each process has {each}",
        f"losses   of {len(pairs)} steps differ by at most {off:.1e}, relative; the last is {pairs[-1][1]:.4f}",
        f"plan     {rounds[-1][1].plan or 'none'}",
    ]
