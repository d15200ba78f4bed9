"""Splits by hand: where a careful user, who has timed the layers, would cut.

Models: all ways to cut a list of units into stages, ordered by an estimate of the step: micro-batches times the busiest
rank's work, and once the longest stage for the ramp. Ignores: transfers, whose cost trying shows.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

__all__ = ["best_bounds"]


def best_bounds(
    seconds: Sequence[float], ranks: Sequence[int], num_microbatches: int, number: int
) -> list[tuple[int, ...]]:
    """The `number` best splits of units (of which each takes `seconds`) to stages on these ranks, the best first.

    Each is the first unit of every stage, and the number of units.
    """
    before = [0.0, *itertools.accumulate(seconds)]
    units, stages = len(seconds), len(ranks)

    def step_s(bounds: tuple[int, ...]) -> float:
        stage_s = [before[end] - before[start] for start, end in itertools.pairwise(bounds)]
        rank_s = [sum(s for s, owner in zip(stage_s, ranks, strict=True) if owner == rank) for rank in set(ranks)]
        return num_microbatches * max(rank_s) + max(stage_s)

    every = ((0, *cuts, units) for cuts in itertools.combinations(range(1, units), stages - 1))
    return heapq.nsmallest(number, every, key=step_s)
