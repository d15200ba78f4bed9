"""Which stages compute their activations again, where memory is short.

Models: on each rank that holds too much, the stages that free most for the time they cost, as few as are needed; tried
on several starts, the fastest that fits wins. Ignores: recomputing parts of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pfeife_accelerate.planner.problem import Problem
from pfeife_accelerate.planner.starts import Start
from pfeife_accelerate.planner.valuation import MISFIT_S, Effort, Valuation

__all__ = ["with_recomputation"]

_TRIED = 24


def with_recomputation(problem: Problem, begun: Sequence[Start]) -> tuple[Start, tuple[int, ...]]:
    """The best start with the stages that recompute; a start that does not fit even so where none does."""
    first = {start.family: start for start in reversed(begun)}
    tried = sorted(begun, key=lambda start: first[start.family] is not start)[:_TRIED]
    found = [_fitted(problem, start) for start in tried]
    return min(found, key=lambda pair: pair[0].value)


def _fitted(problem: Problem, start: Start) -> tuple[Start, tuple[int, ...]]:
    """Stages are added one by one, each on the rank that lacks most, until all ranks fit or nothing is left to add."""
    chosen: tuple[int, ...] = ()
    best = start
    while True:
        valuation = Valuation(problem, start.order, Effort(left_s=np.inf), chosen)
        slices = valuation.slices(start.cuts[None])
        value = float(valuation.value(slices)[0])
        best = replace(start, value=value)
        if value < MISFIT_S:
            return best, chosen
        excess = valuation.memory.peaks(slices)[:, 0] - problem.limits
        added = _next(slices.forward_s[:, 0], slices.saved_bytes[:, 0] - slices.input_bytes[:, 0], slices.stage_ranks,
                      excess, chosen)  # fmt: skip
        if added is None:
            return best, chosen
        chosen = tuple(sorted((*chosen, added)))


def _next(
    forward_s: np.ndarray, freed: np.ndarray, ranks: np.ndarray, excess: np.ndarray, chosen: Sequence[int]
) -> int | None:
    for rank in np.argsort(-excess, kind="stable").tolist():
        if excess[rank] <= 0:
            return None
        stages = [s for s in np.flatnonzero(ranks == rank).tolist() if s not in chosen and freed[s] > 0]
        if stages:
            return int(min(stages, key=lambda s: (forward_s[s] / freed[s], s)))
    return None
