"""Contestants that take turns: all are started, all wait, and one at a time does a few steps.

Models: a machine that is shared and drifts; what takes turns meets the same drift, so that medians over many rounds
compare. A step lasts from the first rank's start to the last rank's end. Ignores: what the contestants are.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from peers_entries import LIBRARIES
from peers_rank import Entry, Steps, serve

__all__ = ["Contestant", "Failure", "StepRecord", "one_thread_each", "started"]

#: What the processes that are forked have in common; loading it once saves seconds for each of them.
PRELOADED = ("torch", "torch.distributed.pipelining", "torch.distributed.fsdp")


class Failure(Exception):
    """A contestant that cannot take part, and why."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of all ranks of a contestant."""

    seconds: float
    loss: float | None


class Contestant:
    """A contestant as the referee sees it."""

    def __init__(self, entry: Entry, model: tuple[str, int], folder: Path, limit_s: float) -> None:
        self.entry = entry
        self.limit_s = limit_s
        port, libraries = _free_port(), LIBRARIES[model[0]]
        context: Any = multiprocessing.get_context("spawn" if entry.is_fresh else "forkserver")
        if not entry.is_fresh:
            context.set_forkserver_preload([*PRELOADED, *libraries])
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(entry.num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(entry, model, libraries, rank, port, folder, there), daemon=True
            )
            with patch.dict(os.environ, entry.at_start):
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        try:
            self.before_mb: list[float] = self._receive()
        except Failure:
            self.stop()
            raise

    def steps(self, number: int) -> list[StepRecord]:
        """Let it do steps."""
        told: list[Steps] = self.ask("steps", number)
        ends = [max(ends) for ends in zip(*(ranks.ended_s for ranks in told), strict=True)]
        starts = [min(ranks.started_s[0] for ranks in told), *ends[:-1]]
        losses = [
            [loss for loss in losses if loss is not None] for losses in zip(*(r.losses for r in told), strict=True)
        ]
        return [
            StepRecord(seconds=end - start, loss=sum(known) / len(known) if known else None)
            for start, end, known in zip(starts, ends, losses, strict=True)
        ]

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Send a command to all ranks; their answers."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((command, *arguments))
            except BrokenPipeError as error:
                raise Failure(f"{self.entry.name}: rank {rank} is gone") from error
        return self._receive()

    def _receive(self) -> list[Any]:
        return [self._receive_from(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def _receive_from(self, rank: int, pipe: Connection) -> Any:
        if not pipe.poll(self.limit_s):
            raise Failure(f"{self.entry.name}: rank {rank} says nothing for {self.limit_s:.0f} s")
        try:
            answer = pipe.recv()
        except EOFError as error:
            raise Failure(f"{self.entry.name}: rank {rank} is gone") from error
        if isinstance(answer, Exception):
            raise Failure(f"{self.entry.name}, rank {rank}: {answer}")
        return answer

    def stop(self) -> None:
        """End its processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


@contextmanager
def started(
    entries: Sequence[Entry],
    model: tuple[str, int],
    folder: Path,
    *,
    limit_s: float = 300,
    warm_up: Callable[[Contestant], None],
) -> Iterator[tuple[dict[str, Contestant], dict[str, str]]]:
    """Start all, one after the other, so that nobody measures while others build; who cannot, and why, comes along."""
    playing: dict[str, Contestant] = {}
    failures: dict[str, str] = {}
    try:
        for entry in entries:
            contestant, start_s = None, time.monotonic()
            try:
                contestant = Contestant(entry, model, folder, limit_s)
                warm_up(contestant)
                playing[entry.name] = contestant
                print(f"{entry.name} is ready after {time.monotonic() - start_s:.1f} s", file=sys.stderr, flush=True)
            except Failure as failure:
                failures[entry.name] = str(failure)
                print(failure, file=sys.stderr, flush=True)
                if contestant is not None:
                    contestant.stop()
        yield playing, failures
    finally:
        for contestant in playing.values():
            contestant.stop()


def one_thread_each() -> None:
    """Set what all processes of the run inherit: one thread, loopback, no network."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
