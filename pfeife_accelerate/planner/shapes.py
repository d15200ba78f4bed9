"""How large the stages are to be, before anything is refined.

A rank of a looped pipeline idles at the start until work reaches it, and at the end while the rest drains: each time
the first stages' time on all ranks before it. Small stages in the first loop make that short, and what the first loop
gives to do covers the ramp of the next one, so stages may grow by a factor from loop to loop; towards the last loop,
where forwards turn into backwards, they shrink again where there are no other micro-batches to fill the gap.

Models: that profile, (smallest, growth) at both ends, by loop or by stage; equal time; equal memory.
Ignores: the order, and whether a profile suits it: the search values them all.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import product

import numpy as np

from pfeife_accelerate.planner.problem import Floats, Ints, Problem

__all__ = ["equal_time_cuts", "profiles", "shaped_cuts"]

_BISECTIONS = 40
_EVEN_ENOUGH = 1e-9  # of all time
_COARSE = ((1.0, 1.0), (0.1, 2.0), (0.2, 1.4), (0.35, 2.0), (0.5, 1.4))
_SLOPES = (0.25, 0.5, 0.75)
_FINE = ((1.0, 1.0), *product((0.1, 0.2, 0.35, 0.5, 0.7), (1.4, 2.0, 3.0)))


def profiles(num_ranks: int, num_stages: int, *, fine: bool) -> Floats:
    """Relative stage times, a row for each profile, equal time first."""
    stages = np.arange(num_stages)
    last_loop = (num_stages - 1) // num_ranks
    rows = [np.ones(num_stages)]
    if num_stages > 1:
        ends = _FINE if fine else _COARSE
        for (start, growth), (end, shrinking), by_stage in product(ends, ends, (False, True)):
            loop = stages / num_ranks if by_stage else stages // num_ranks
            to_last = (num_stages - 1) / num_ranks - loop if by_stage else last_loop - loop
            rows.append(np.minimum(1.0, np.minimum(start * growth**loop, end * shrinking**to_last)))
    if num_ranks > 1:
        # The first ranks are the last to end: with less to do, and fewer parameters, their optimizer step is shorter.
        for least in _SLOPES:
            rows.append(np.linspace(least, 1.0, num_ranks)[stages % num_ranks])
    table = np.stack(rows)
    _, first = np.unique(np.round(table / table.sum(axis=1, keepdims=True), 9), axis=0, return_index=True)
    return table[np.sort(first)]


def shaped_cuts(problem: Problem, weights: Floats, measure: Floats | None = None) -> Ints:
    """Cuts where the running sum of `measure` (default: time) is nearest to that of the weights; a row for each."""
    prefix = problem.work_s if measure is None else measure
    positions = problem.positions
    here = prefix[positions]
    share = np.cumsum(weights, axis=1)[:, :-1] / weights.sum(axis=1, keepdims=True)
    wanted = share * prefix[-1]
    index = np.searchsorted(here, wanted).clip(1, max(len(here) - 1, 1))
    if len(here) > 1:
        index = index - (wanted - here[index - 1] < here[index] - wanted)
    else:
        index = np.zeros_like(index)
    number = index.shape[1]
    for cut in range(1, number):
        index[:, cut] = np.maximum(index[:, cut], index[:, cut - 1] + 1)
    index = np.minimum(index, len(positions) - number + np.arange(number))
    return np.unique(positions[index], axis=0)


def equal_time_cuts(problem: Problem, num_stages: int) -> Ints:
    """The cuts whose slowest stage is fastest, transfers left out: bisection over the slowest stage's time."""
    here = problem.work_s[problem.positions].tolist()
    total = float(problem.work_s[-1])
    low, high = total / num_stages, total
    best = list(range(num_stages - 1))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        cuts: list[int] = []
        at_s = slowest = 0.0
        for stage in range(num_stages - 1):
            least = cuts[-1] + 1 if cuts else 0
            index = bisect_right(here, at_s + middle * (1 + 1e-12), lo=least) - 1
            cuts.append(min(max(index, least), len(here) - (num_stages - 1 - stage)))
            slowest = max(slowest, here[cuts[-1]] - at_s)
            at_s = here[cuts[-1]]
        slowest = max(slowest, total - at_s)
        if slowest <= middle * (1 + 1e-9):
            high, best = min(slowest, middle), cuts  # as good as it looks: there is nothing between the two to try
        else:
            low = middle
        if high - low <= _EVEN_ENOUGH * total:
            break
    return problem.positions[np.asarray(best, dtype=np.int64)]
