"""How long consecutive operations take as one stage, and costs that add up to it.

Models: the forwards of one micro-batch, then its backwards, as ranks run them: instructions, weights and results come
from where they come from in a step, which operations that are run alone do not meet. Ignores: how it differs from one
kind of operation to another: all in a stage are scaled alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final, TypeVar

import torch

from pfeife_accelerate.compat_autocast import autocast_as_it_was
from pfeife_accelerate.cost.op_profile import clean_slate
from pfeife_accelerate.cost.op_trial import engine_s
from pfeife_accelerate.ir.costs import CostTable, OpCost, TrialStage
from pfeife_accelerate.log import get_logger

__all__ = ["as_in_stages", "stage_seconds"]

_LOG = get_logger(__name__)
_Given = TypeVar("_Given")
_Result = TypeVar("_Result")
_RUNS: Final = 4
_MOST_OFF: Final = 4.0  #: what differs by more has been disturbed


def stage_seconds(makers: Sequence[Callable[[], TrialStage]], device: torch.device) -> list[tuple[float, float] | None]:
    """For each stage the median seconds of its forward, and of its backward, which adds to gradients that are there.

    None for one that cannot be made or run on made-up data. The stages take turns, as in a step, so that what disturbs
    the device for a moment falls on all of them. Random numbers, gradient mode and autocast are left as they were.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in makers]
    with clean_slate(device):
        overhead_s = engine_s(device)
        stages = _tried(dict(enumerate(makers)), lambda make: make())
        for _ in range(1 + _RUNS):  # the first time loads libraries and makes the gradients
            # All forwards before the backwards: what a backward reads was written a while ago.
            forwards = _tried(stages, partial(_forward, device))
            backwards = _tried(dict(reversed(forwards.items())), partial(_backward, device))
            for number, backward_s in backwards.items():
                times[number].append((forwards[number][0], max(backward_s - overhead_s, 0.0)))
            stages = {number: stage for number, stage in stages.items() if number in backwards}
            forwards.clear()
        done = set(stages)
        stages.clear()  # before the device's memory is given back
    return [
        (median(f for f, _ in found[1:]), median(b for _, b in found[1:])) if number in done else None
        for number, found in enumerate(times)
    ]


def _tried(given: Mapping[int, _Given], run: Callable[[_Given], _Result]) -> dict[int, _Result]:
    """What `run` makes of each, without those that fail: made-up data may be refused in any way."""
    found = {}
    for number, item in given.items():
        try:
            found[number] = run(item)
        except Exception as failure:
            _LOG.debug("a stage cannot be made up or run on made-up data: %s", failure)
    return found


def _forward(device: torch.device, stage: TrialStage) -> tuple[float, list[Any]]:
    """Its seconds, and what the backward starts from."""
    for value in stage.values:
        value.grad = None
    with torch.enable_grad(), autocast_as_it_was(device.type):
        began_s = _now(device)
        roots = stage.forward()
        return _now(device) - began_s, roots


def _backward(device: torch.device, forward: tuple[float, list[Any]]) -> float:
    _, roots = forward
    gradients = [torch.ones_like(root) for root in roots]
    began_s = _now(device)
    if roots:
        torch.autograd.backward(roots, gradients)
    return _now(device) - began_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_in_stages(costs: CostTable, found: Iterable[tuple[slice, float, float]]) -> CostTable:
    """`found` gives stages with the seconds of their forward and backward: their operations' costs add up to these.

    Other operations change as those do together: costs of all are to be compared. What is off by more than a factor of
    four is taken for disturbed, and counts as much as that.
    """
    stages = list(found)
    tried = [op for stage, *_ in stages for op in costs.ops[stage]]
    rest = _ratios(tried, sum(f for _, f, _ in stages), sum(b for *_, b in stages))
    ops = [_scaled(op, *rest) for op in costs.ops]
    for stage, forward_s, backward_s in stages:
        ratios = _ratios(costs.ops[stage], forward_s, backward_s)
        ops[stage] = [_scaled(op, *ratios) for op in costs.ops[stage]]
    return CostTable(ops=tuple(ops))


def _ratios(ops: Sequence[OpCost], forward_s: float, backward_s: float) -> tuple[float, float]:
    return _ratio(forward_s, sum(op.forward_s for op in ops)), _ratio(backward_s, sum(op.backward_s for op in ops))


def _ratio(seconds: float, expected_s: float) -> float:
    return min(max(seconds / expected_s, 1 / _MOST_OFF), _MOST_OFF) if expected_s > 0 else 1.0


def _scaled(op: OpCost, forward: float, backward: float) -> OpCost:
    return replace(
        op,
        forward_s=op.forward_s * forward,
        backward_input_s=op.backward_input_s * backward,
        backward_weight_s=op.backward_weight_s * backward,
    )
