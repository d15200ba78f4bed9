"""One process of `pfeife zoo bench`: it makes what a training script makes, then trains when it is told to.

Models: the loop of any Accelerate script, which knows of no pipeline. It sleeps until it is asked, so that whoever
takes turns with it has the machine. Ignores: data sets; a few batches are made before the first step and come again.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator

from pfeife_accelerate import session
from pfeife_accelerate.zoo import member

__all__ = ["Setting", "Turn", "serve"]

_NUM_BATCHES: Final = 4
_LEARNING_RATE: Final = 1e-4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and with what."""

    name: str
    rows: int
    seq: int | None
    resolution: int | None
    mixed_precision: str
    device: str  #: "cpu" or "cuda"
    threads: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Some steps of one process, on the clock that all processes share."""

    start_s: float
    ends_s: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: int | None  #: since the turn before, more than before the model was made
    plan: str | None  #: of a pipeline


def serve(connection: Connection) -> None:
    """Take a `Setting`, make the trainer, and answer each number of steps by a `Turn`, until there is none more."""
    setting: Setting = connection.recv()
    torch.set_num_threads(setting.threads)
    trainer = _Trainer(setting)
    connection.send("ready")
    while number := connection.recv():
        connection.send(trainer.turn(number))


class _Trainer:
    """What stands above the loop of a training script, and the loop."""

    def __init__(self, setting: Setting) -> None:
        model = member(setting.name)
        self._accelerator = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
        self._before_bytes = _resident_bytes("VmRSS") or 0
        module = model.build("random", seed=0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE)
        self._model, self._optimizer = self._accelerator.prepare(module, optimizer)
        batches = [
            model.batch(setting.rows, seed=seed, seq=setting.seq, resolution=setting.resolution)
            for seed in range(_NUM_BATCHES)
        ]
        self._batches = itertools.cycle([batch.to(self._accelerator.device) for batch in batches])
        self._loss = model.loss

    def turn(self, number: int) -> Turn:
        """So many steps."""
        _forget_peak()
        start_s, ends_s, losses = time.monotonic(), [], []
        for _ in range(number):
            losses.append(self._step())
            ends_s.append(time.monotonic())
        return Turn(
            start_s=start_s,
            ends_s=tuple(ends_s),
            losses=tuple(losses),
            peak_bytes=self._peak_bytes(),
            plan=_plan(),
        )

    def _step(self) -> float:
        batch = next(self._batches)
        loss = self._loss(self._model(**batch.inputs), batch.targets)
        self._accelerator.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        value: float = loss.item()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return value

    def _peak_bytes(self) -> int | None:
        if self._accelerator.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        peak = _resident_bytes("VmHWM")
        return None if peak is None else max(0, peak - self._before_bytes)


def _plan() -> str | None:
    running = session.current()
    plans: list[Any] = [model.plan for model in running.models] if running is not None else []
    if not plans or plans[0] is None:
        return None
    spec = plans[0].spec
    return f"{spec.family.value}, {spec.num_microbatches} micro-batches, {plans[0].num_stages} stages"


def _resident_bytes(key: str) -> int | None:
    """`VmRSS`, what the process holds, or `VmHWM`, the most it held; None where the system does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = status.read_text(encoding="ascii").splitlines()
    found: Mapping[str, str] = dict(line.split(":", 1) for line in lines)
    return int(found[key].split()[0]) * 1024


def _forget_peak() -> None:
    """Count the peak anew: building and capturing are over."""
    gc.collect()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5", encoding="ascii")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    # A copy under its importable name: what is sent must be found there by the other side.
    from pfeife_accelerate.tools.zoo_rank import serve as serve_as_module

    serve_as_module(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # the other ranks may be gone already, which a library's farewell would wait for
