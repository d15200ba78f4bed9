"""Orders that keep fewer micro-batches alive than any family does, for models that fit in no other way.

Models: one forward, one backward, where no rank is more than a few micro-batches ahead, down to a single one; cuts that
even out the memory that this needs, then improved for time. Ignores: several stages a rank, which keep more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pfeife_accelerate.ir import ScheduleFamily
from pfeife_accelerate.planner.improve import reordered
from pfeife_accelerate.planner.problem import Ints, Problem
from pfeife_accelerate.planner.refine import refine
from pfeife_accelerate.planner.starts import Start, as_wanted, by_value, listed, loops, starting_cuts
from pfeife_accelerate.planner.valuation import Effort, Valuation
from pfeife_accelerate.schedule.families import looped_order

__all__ = ["thrifty_starts"]

_EFFORT_S = 1.0  # for each number of micro-batches alive, beside what the search has spent
_MOST_TRIED = 6
_ROUNDS = 32
_BISECTIONS = 40


def thrifty_starts(problem: Problem) -> list[Start]:
    """One start for each number of micro-batches alive that is tried, the best first; none where the user says more."""
    options = problem.options
    is_free = options.family in (None, ScheduleFamily.LIST) and options.num_loops in (None, 1)
    if not is_free or options.microbatches_per_loop or options.prefetch_forwards or 1 not in loops(problem):
        return []
    most = min(problem.num_ranks, problem.num_microbatches) - 1
    numbers = np.unique(np.geomspace(1, most, _MOST_TRIED).round().astype(int)).tolist() if most > 0 else []
    return sorted((_start(problem, alive) for alive in numbers), key=by_value)


def _start(problem: Problem, alive: int) -> Start:
    ranks, number = problem.num_ranks, problem.num_microbatches
    order = as_wanted(problem, looped_order(tuple(range(ranks)), number, block=number, most_alive=alive))
    effort = Effort(left_s=_EFFORT_S)
    valuation = Valuation(problem, order, effort)
    cuts = starting_cuts(problem, ranks, fine=True)
    if problem.options.cuts is None:
        kept = [min(alive, ranks - rank) for rank in range(ranks)]
        cuts = np.concatenate((_even_memory(problem, kept)[None], cuts))
    best = int(valuation.values(cuts).argmin())
    start = Start(spec=listed(problem, num_loops=1), order=order, cuts=cuts[best], value=valuation.exact(cuts[best]))
    if problem.options.effort == "quick" or problem.options.cuts is not None:
        return start
    found = refine(valuation, start.cuts, rounds=_ROUNDS)
    exact = valuation.exact(found.cuts)
    if exact < start.value:
        start = replace(start, cuts=found.cuts, value=exact)
    return reordered(problem, start, effort)


def _even_memory(problem: Problem, kept: Sequence[int]) -> Ints:
    """Cuts whose fullest rank is emptiest, where rank r keeps the activations of `kept[r]` micro-batches."""
    positions = problem.positions
    last = len(positions)
    ends = np.append(positions, len(problem.graph.nodes))
    needs = [problem.state_bytes + number * problem.saved_bytes for number in kept]
    low, high = 0.0, float(needs[0][-1])
    best = list(range(len(kept) - 1))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        cuts: list[int] = []
        at, fullest = 0, 0.0
        for rank, need in enumerate(needs[:-1]):
            least = cuts[-1] + 1 if cuts else 0
            index = int(np.searchsorted(need[positions], need[at] + middle, side="right")) - 1
            cuts.append(min(max(index, least), last - (len(kept) - 1 - rank)))
            fullest = max(fullest, float(need[ends[cuts[-1]]] - need[at]))
            at = int(ends[cuts[-1]])
        if max(fullest, float(needs[-1][-1] - needs[-1][at])) <= middle:
            high, best = middle, cuts
        else:
            low = middle
    return positions[np.asarray(best, dtype=np.int64)]
