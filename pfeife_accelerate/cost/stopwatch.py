"""How long an operation takes on a device, as one of many in a step.

Models: the median over several copies of it, each with tensors of its own, so that no copy finds its weights, its saved
values or its results in a cache because the one before was the same; what the operation before has just made is touched
first. On CUDA the time on the stream, over all copies.
Ignores: cold instructions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch

__all__ = ["SLOW_S", "Run", "seconds"]

SLOW_S: Final = 0.05  # what takes longer needs few runs
_TOUCHED_S: Final = 1e-5  # what is shorter than this is spent on calling the operation, not on its operands


@dataclass(frozen=True)
class Run:
    """One copy: `do` is timed; before it `fresh` is read, after it `clear` frees what a step would not keep."""

    do: Callable[[], Any]
    fresh: tuple[torch.Tensor, ...] = ()
    clear: Callable[[], None] = lambda: None


def seconds(runs: Sequence[Run], device: torch.device) -> float:
    """Median seconds of one of `runs`, which are made in turn; after one of what takes long no more are made."""
    if device.type == "cuda":
        return _on_stream(runs, device)
    found: list[float] = []
    for run in runs:
        if not found or found[0] > _TOUCHED_S:
            for tensor in run.fresh:
                _read(tensor)
        began_s = time.perf_counter()
        run.do()
        found.append(time.perf_counter() - began_s)
        run.clear()
        if sum(found) > 4 * SLOW_S:
            break
    return median(found)


def _on_stream(runs: Sequence[Run], device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for run in runs:
        run.do()
        run.clear()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) * 1e-3 / len(runs)


def _read(tensor: torch.Tensor) -> None:
    if tensor.layout is torch.strided:
        torch.count_nonzero(tensor.detach())
