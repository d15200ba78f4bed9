"""One process of a contestant: it makes its trainer, then does what the referee asks, and sleeps in between.

Models: a trainer is set up once and lives as long as the run. Messages come over a pipe, whose reading costs no
processor time. Ignores: who else takes part (`peers_turns.py`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Entry", "Holdings", "Place", "Steps", "Trainer", "memory_mb", "serve"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Who takes part: a name for the table, and the function that makes its trainer on each of its ranks."""

    name: str
    maker: str  #: "module:function", called with the model's case and a `Place`
    num_ranks: int = 2
    num_microbatches: int | None = None  #: None where the contestant does not cut the batch, or chooses itself
    imports: tuple[str, ...] = ()  #: what belongs to its memory before the start
    path: tuple[str, ...] = ()  #: folders to import from beside the usual ones
    environment: Mapping[str, str | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    connects_itself: bool = False  #: starts the process group by itself
    at_start: Mapping[str, str] = field(default_factory=dict)  #: variables that a new interpreter must find

    @property
    def is_fresh(self) -> bool:
        """Whether it is started as a new interpreter instead of as a fork of one that has torch loaded."""
        return bool(self.at_start)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a trainer is made."""

    rank: int
    num_ranks: int
    num_microbatches: int | None
    folder: Path  #: kept as long as the run
    options: Mapping[str, Any]


class Trainer(Protocol):
    """One rank of a contestant."""

    def step(self) -> float | None:
        """A whole step, the optimizer's included; the batch's loss where this rank knows it."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a rank tells of some steps: seconds on the clock that all processes share, and the losses."""

    started_s: tuple[float, ...]
    ended_s: tuple[float, ...]
    losses: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a process holds at a moment."""

    memory_mb: float
    threads: int
    descriptors: int
    cpu_s: float  #: that it has used so far

    @classmethod
    def now(cls) -> Holdings:
        """Of this process, with garbage collected, so that only what is held counts."""
        gc.collect()
        tasks, descriptors = Path("/proc/self/task"), Path("/proc/self/fd")
        return cls(
            memory_mb=memory_mb("VmRSS"),
            threads=len(list(tasks.iterdir())),
            descriptors=len(list(descriptors.iterdir())) - 1,  # without the one that this listing takes
            cpu_s=time.process_time(),
        )


def serve(
    entry: Entry, model: tuple[str, int], libraries: Sequence[str], rank: int, port: int, folder: Path, pipe: Connection
) -> None:
    """The process's life."""
    _environment(entry, rank, port)
    log = (folder / f"{entry.name.replace(' ', '-').replace('/', '-')}.{rank}.log").open("w", encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        _answer(entry, model, libraries, rank, folder, pipe)
    except EOFError:
        pass  # the referee is gone: so is the run
    except BaseException as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        pipe.send(RuntimeError(f"{type(error).__name__}: {text}"))
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the other rank may be gone already, which a library's farewell would wait for


def _environment(entry: Entry, rank: int, port: int) -> None:
    given = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(entry.num_ranks),
        "LOCAL_WORLD_SIZE": str(entry.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **entry.environment,
    }
    for name, value in given.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _answer(
    entry: Entry, model: tuple[str, int], libraries: Sequence[str], rank: int, folder: Path, pipe: Connection
) -> None:
    import torch

    torch.set_num_threads(1)
    sys.path += entry.path
    for module in (*libraries, *entry.imports):
        import_module(module)
    if entry.num_ranks > 1 and not entry.connects_itself:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=entry.num_ranks)
    import_module("peers_models")
    maker = getattr(import_module(entry.maker.split(":")[0]), entry.maker.split(":")[1])
    before_mb = memory_mb("VmRSS")
    case = import_module("peers_models").build(*model)
    place = Place(
        rank=rank,
        num_ranks=entry.num_ranks,
        num_microbatches=entry.num_microbatches,
        folder=folder,
        options=entry.options,
    )
    trainer: Trainer = maker(case, place)
    del case
    pipe.send(before_mb)
    while (command := pipe.recv()) is not None:
        pipe.send(_reply(trainer, before_mb, *command))


def _reply(trainer: Trainer, before_mb: float, command: str, *arguments: Any) -> Any:
    match command:
        case "steps":
            return _steps(trainer, *arguments)
        case "forget the peak":
            return _forget_peak()
        case "peak":
            return memory_mb("VmHWM") - before_mb
        case "holdings":
            return Holdings.now()
        case _:
            return getattr(trainer, command)(*arguments)


def _steps(trainer: Trainer, number: int) -> Steps:
    started_s, ended_s, losses = [], [], []
    for _ in range(number):
        started_s.append(time.monotonic())
        losses.append(trainer.step())
        ended_s.append(time.monotonic())
    return Steps(started_s=tuple(started_s), ended_s=tuple(ended_s), losses=tuple(losses))


def memory_mb(key: str) -> float:
    """`VmRSS`, what the process holds, or `VmHWM`, the most it held."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(key)


def _forget_peak() -> None:
    """Give back what building and warming up left, and count the peak anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
