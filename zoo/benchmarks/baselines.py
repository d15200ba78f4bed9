"""The strong baseline that plans are measured against: equal-time cuts with the best looped parameters.

Models: up to 8 loops, blocks of as many micro-batches as ranks or of all, no prefetch or all of it, stage s on rank
s mod D; each simulated, and the fastest that fits into memory taken.
Ignores: `cut_allowed`; graphs where some cuts are forbidden have no such baseline.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from event_simulator import Outcome, simulate_layout
from pipeline_layout import Layout
from pipeline_orders import Parameters, looped, round_robin

from pfeife_accelerate.ir import CostGraph, Machine

__all__ = ["Baseline", "baselines", "best_fitting", "equal_time_cuts"]

_MOST_LOOPS = 8
_WORTH_IT = 0.98  # the bisection's cuts are taken where they lower the longest stage by more than this


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One member of the baseline, simulated."""

    parameters: Parameters
    cuts: tuple[int, ...]
    outcome: Outcome


def equal_time_cuts(graph: CostGraph, stages: int) -> tuple[int, ...]:
    """Cuts nearest to equal fractions of the time, or those with the shortest longest stage where they are better."""
    # Equal blocks make many ties, which the last bit decides: sums of the file's own decimals are the same everywhere.
    total = [0.0, *accumulate(_ms(node.forward_s) + _ms(node.backward_s) for node in graph.nodes)]
    near = _nearest(total, stages)
    low, high, best = total[-1] / stages, _longest(total, near), near
    for _ in range(50):
        middle = (low + high) / 2
        cuts = _filled(total, stages, middle)
        if _longest(total, cuts) <= middle:
            high, best = middle, cuts
        else:
            low = middle
    return best if _longest(total, best) < _WORTH_IT * _longest(total, near) else near


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 9)


def _longest(total: Sequence[float], cuts: Sequence[int]) -> float:
    return max(total[last] - total[first] for first, last in pairwise((0, *cuts, len(total) - 1)))


def _nearest(total: Sequence[float], stages: int) -> tuple[int, ...]:
    cuts: list[int] = []
    last = len(total) - 1
    for number in range(1, stages):
        wanted = total[-1] * number / stages
        cut = bisect.bisect_left(total, wanted)
        if cut and wanted - total[cut - 1] < total[cut] - wanted:
            cut -= 1
        cuts.append(min(max(cut, cuts[-1] + 1 if cuts else 1), last - (stages - number)))
    return tuple(cuts)


def _filled(total: Sequence[float], stages: int, longest: float) -> tuple[int, ...]:
    """Each stage as long as `longest` allows, at least one operation each."""
    cuts = [0]
    for number in range(1, stages):
        cut = bisect.bisect_right(total, total[cuts[-1]] + longest) - 1
        cuts.append(max(cuts[-1] + 1, min(cut, len(total) - 1 - (stages - number))))
    return tuple(cuts[1:])


def baselines(graph: CostGraph, machine: Machine, ranks: int, microbatches: int) -> Iterator[Baseline]:
    """All members that can run."""
    for loops in range(1, min(_MOST_LOOPS, len(graph.nodes) // ranks) + 1):
        cuts = equal_time_cuts(graph, ranks * loops)
        layout = Layout(graph, cuts, round_robin(ranks, loops), ranks)
        for per_loop in {ranks, min(ranks, microbatches), microbatches}:
            for prefetch in {0, ranks - 1}:
                parameters = Parameters(loops=loops, per_loop=per_loop, prefetch=prefetch)
                outcome = simulate_layout(layout, machine, looped(ranks, microbatches, parameters))
                if outcome is not None:
                    yield Baseline(parameters=parameters, cuts=cuts, outcome=outcome)


def best_fitting(found: Sequence[Baseline], limit_bytes: float) -> Baseline | None:
    """The fastest that fits, if any does."""
    fitting = [baseline for baseline in found if baseline.outcome.fits(limit_bytes)]
    return min(fitting, key=lambda baseline: baseline.outcome.makespan_s, default=None)
