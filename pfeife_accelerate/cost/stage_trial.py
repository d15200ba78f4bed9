"""How long consecutive operations take as one stage, and costs that add up to it.

Models: a forward and a backward of one micro-batch after the other, as a rank runs them: instructions, weights and
results come from where they come from in a step, which operations that are run alone do not meet. Ignores: how it
differs from one kind of operation to another: all in a stage are scaled alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import torch

from pfeife_accelerate.cost.op_profile import clean_slate
from pfeife_accelerate.ir.costs import CostTable, OpCost

__all__ = ["as_in_stages", "stage_seconds"]

_RUNS: Final = 3
_MOST_OFF: Final = 2.0  #: what differs by more has been disturbed


def stage_seconds(
    forward: Callable[[], Sequence[torch.Tensor]], values: Sequence[torch.Tensor], device: torch.device
) -> tuple[float, float]:
    """Median seconds of a forward, and of a backward from all of its results, which adds to gradients that are there.

    Gradients of `values` are forgotten each time: in a step they go to the stage before.
    """
    found: list[tuple[float, float]] = []
    with clean_slate(device):
        for _ in range(1 + _RUNS):  # the first one loads libraries and makes the gradients
            for value in values:
                value.grad = None
            began_s = _now(device)
            roots = forward()
            between_s = _now(device)
            gradients = [torch.ones_like(root) for root in roots]
            ready_s = _now(device)
            if roots:
                torch.autograd.backward(roots, gradients)
            del roots
            found.append((between_s - began_s, _now(device) - ready_s))
    forwards, backwards = zip(*found[1:], strict=True)
    return median(forwards), median(backwards)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_in_stages(costs: CostTable, found: Iterable[tuple[slice, float, float]]) -> CostTable:
    """`found` gives stages with the seconds of their forward and backward: their operations' costs add up to these.

    What is off by more than a factor of two is taken for disturbed, and counts as much as that.
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
