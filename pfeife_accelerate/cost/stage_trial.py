"""How long consecutive operations take as one stage, and costs that add up to it.

Models: a forward and a backward of one micro-batch after the other, as a rank runs them: instructions, weights and
results come from where they come from in a step, which operations that are run alone do not meet. Ignores: how it
differs from one kind of operation to another: all in a stage are scaled alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import torch

from pfeife_accelerate.cost.op_profile import clean_slate
from pfeife_accelerate.ir.costs import CostTable, OpCost, TrialStage

__all__ = ["as_in_stages", "stage_seconds"]

_RUNS: Final = 4
_MOST_OFF: Final = 4.0  #: what differs by more has been disturbed


def stage_seconds(stages: Sequence[TrialStage], device: torch.device) -> list[tuple[float, float]]:
    """For each stage the median seconds of its forward, and of its backward, which adds to gradients that are there.

    The stages take turns, as in a step, so that what disturbs the device for a moment falls on all of them.
    """
    found: list[list[tuple[float, float]]] = [[] for _ in stages]
    with clean_slate(device):
        for _ in range(1 + _RUNS):  # the first time loads libraries and makes the gradients
            for stage, times in zip(stages, found, strict=True):
                times.append(_once(stage, device))
    return [(median(f for f, _ in times[1:]), median(b for _, b in times[1:])) for times in found]


def _once(stage: TrialStage, device: torch.device) -> tuple[float, float]:
    for value in stage.values:
        value.grad = None
    began_s = _now(device)
    roots = stage.forward()
    forward_s = _now(device) - began_s
    gradients = [torch.ones_like(root) for root in roots]
    began_s = _now(device)
    if roots:
        torch.autograd.backward(roots, gradients)
    return forward_s, _now(device) - began_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_in_stages(costs: CostTable, found: Iterable[tuple[slice, float, float]]) -> CostTable:
    """`found` gives stages with the seconds of their forward and backward: their operations' costs add up to these.

    What is off by more than a factor of four is taken for disturbed, and counts as much as that.
    """
    ops = list(costs.ops)
    for stage, forward_s, backward_s in found:
        forward = _ratio(forward_s, sum(op.forward_s for op in costs.ops[stage]))
        backward = _ratio(backward_s, sum(op.backward_s for op in costs.ops[stage]))
        ops[stage] = [_scaled(op, forward, backward) for op in costs.ops[stage]]
    return CostTable(ops=tuple(ops))


def _ratio(seconds: float, expected_s: float) -> float:
    return min(max(seconds / expected_s, 1 / _MOST_OFF), _MOST_OFF) if expected_s > 0 else 1.0


def _scaled(op: OpCost, forward: float, backward: float) -> OpCost:
    return replace(
        op,
        forward_s=op.forward_s * forward,
        backward_input_s=op.backward_input_s * backward,
        backward_weight_s=op.backward_weight_s * backward,
    )
