"""Making the most of the starts: cuts for the order, order for the cuts, and shaking what is best.

Models: starts that compete, the better half of them at each turn with more rounds than before; the best of them moved
at random and improved again until the effort is spent; what is small enough tried out whole.
Ignores: where starts come from, and what becomes of the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np

from pfeife_accelerate.ir import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.planner.problem import Problem
from pfeife_accelerate.planner.refine import Refined, kicked, refine, shake
from pfeife_accelerate.planner.reorder import reorder
from pfeife_accelerate.planner.starts import Start, all_orders, as_wanted, by_value, listed, order_for, starting_cuts
from pfeife_accelerate.planner.valuation import Effort, Valuation
from pfeife_accelerate.schedule.families import looped_order
from pfeife_accelerate.schedule.order import Order

__all__ = ["improved", "is_small", "lifted", "reordered", "selected", "shaken", "tried_out"]

_BEAM = 5  # starts that are improved where the cuts are given
_FINE = 10  # starts that see all profiles, and are improved
_SEEN_AGAIN = 8  # of all profiles, after a first look
_FIRST_ROUNDS = 12
_SELECTING = 0.75  # of the effort, to find what is worth shaking
_SHARE = 0.4  # of what is left, that one such selection may take
_TURNS = 4
_SHAKES = 400
_HOPEFUL, _PROMISING = 1.02, 1.004  # of the best value: how bad a kicked slicing may be before it is refined, and after
_KICK_ROUNDS = 6
_TOLERABLE = 1.002
_KICKS, _SHAKES_OF_ONE = 4, 2  # by turns
_FINALISTS = 2
_TURNS_OF_ALL = 2
_EXHAUSTIVE = 80_000  # slicings times orders that are tried out rather than searched
_EXHAUSTIVE_OPERATIONS = 24
_LOOKED_AT_ALONE = 4  # of those, for each order: see `Valuation.value`


def improved(problem: Problem, begun: list[Start], effort: Effort) -> Start:
    """The best that can be made of the starts."""
    if problem.options.cuts is not None:
        finished = [reordered(problem, start, effort) for start in begun[:_BEAM]]
        return min(finished, key=by_value)
    first = effort.part(_SELECTING)
    finalists = selected(problem, begun, first)
    effort.spend(-first.left_s)
    return shaken(problem, finalists, effort)


def tried_out(problem: Problem, begun: list[Start], effort: Effort) -> Start:
    """The best of all slicings there are, for each order there is."""
    others = all_orders(problem) if problem.options.family is None else []
    return reordered(problem, min(_all_slicings(problem, [*begun, *others]), key=by_value), effort)


def selected(problem: Problem, begun: list[Start], effort: Effort) -> list[Start]:
    """The best two starts after the best of them have been improved.

    The chosen ones get some rounds each, the better half of them more. What is large leaves time for the most promising
    of them alone.
    """
    chosen = [_on_all_profiles(problem, start, effort) for start in _varied(begun, _FINE)]
    chosen.sort(key=by_value)
    rounds, finalists = _FIRST_ROUNDS, chosen[:1]
    while len(chosen) > 1 and not effort.is_spent:
        least_s = effort.left_s * (1 - _SHARE)
        turned: list[Start] = []
        for start in chosen:
            if len(turned) < 2 or effort.left_s > least_s:
                turned.append(_by_turns(problem, start, effort, rounds))
        turned.sort(key=by_value)
        chosen, finalists = turned[: len(turned) // 2], turned[:_FINALISTS]
        rounds *= 4
    return finalists


def lifted(problem: Problem, start: Start, effort: Effort) -> Start | None:
    """A start of the same question with fewer micro-batches, for all of them; None where no order of its kind runs."""
    number, ranks = problem.num_microbatches, problem.num_ranks
    if start.spec.family is ScheduleFamily.LOOPED:  # larger blocks may not fit any more
        specs = [replace(start.spec, num_microbatches=number, microbatches_per_loop=block) for block in (ranks, number)]
        ones = [_valued(problem, spec, order_for(problem, spec), start, effort) for spec in specs]
        return min((one for one in ones if one is not None), key=by_value, default=None)
    if start.spec.family is not ScheduleFamily.LIST:
        spec = replace(start.spec, num_microbatches=number)
        return _valued(problem, spec, order_for(problem, spec), start, effort)
    spec = replace(start.spec, num_microbatches=number)
    found = []
    for block in dict.fromkeys((min(ranks, number), number)):
        order = looped_order(start.order.stage_ranks, number, block=block, prefetch=ranks - 1)
        one = _valued(problem, spec, as_wanted(problem, order), start, effort)
        if one is not None:
            found.append(reordered(problem, one, effort))
    return min(found, key=by_value, default=None)


def _valued(problem: Problem, spec: ScheduleSpec, order: Order, start: Start, effort: Effort) -> Start | None:
    value = float(Valuation(problem, order, effort).values(start.cuts[None])[0])
    return Start(spec=spec, order=order, cuts=start.cuts, value=value) if np.isfinite(value) else None


def _varied(begun: list[Start], number: int) -> list[Start]:
    """The best starts, at most two of a family and number of loops."""
    count: dict[tuple[str, int], int] = {}
    chosen = []
    for start in begun:
        kind = (start.family, start.spec.num_loops)
        count[kind] = count.get(kind, 0) + 1
        if count[kind] <= 2:
            chosen.append(start)
    return chosen[:number]


def _on_all_profiles(problem: Problem, start: Start, effort: Effort) -> Start:
    if effort.is_spent:
        return start
    cuts = starting_cuts(problem, start.order.num_stages, fine=True)
    valuation = Valuation(problem, start.order, effort)
    best = cuts[np.argsort(valuation.first_look(cuts), kind="stable")[:_SEEN_AGAIN]]
    values = valuation.values(best)
    chosen = int(values.argmin())
    return replace(start, cuts=best[chosen], value=float(values[chosen])) if values[chosen] < start.value else start


def _by_turns(problem: Problem, start: Start, effort: Effort, rounds: int) -> Start:
    """Cuts for the order, order for the cuts, until neither helps or the rounds are over."""
    current = start
    for _ in range(_TURNS):
        before = current.value
        found = refine(Valuation(problem, current.order, effort), current.cuts, rounds=rounds)
        if found.value <= current.value:
            current = replace(current, cuts=found.cuts, value=found.value)
        current = reordered(problem, current, effort)
        if current.value >= before * (1 - 1e-6) or effort.is_spent or rounds < 16:
            break
    return current


def reordered(problem: Problem, start: Start, effort: Effort) -> Start:
    """The start with a better order, where the user leaves the order to us."""
    if _keeps_order(problem):
        return start
    order, value = reorder(Valuation(problem, start.order, effort), start.cuts)
    if value >= start.value * (1 - 1e-9):
        return start
    return replace(start, spec=listed(problem, start.spec.num_loops), order=order, value=value)


def _keeps_order(problem: Problem) -> bool:
    """Whether the user has chosen the order."""
    options = problem.options
    is_chosen = options.family not in (None, ScheduleFamily.LIST)
    return is_chosen or options.microbatches_per_loop is not None or options.prefetch_forwards is not None


def shaken(problem: Problem, finalists: list[Start], effort: Effort) -> Start:
    """Random moves and descents from the finalists by turns, with the same random numbers each time.

    Of the kinds of move the one goes next that has spent less since it last helped.
    """
    generator = np.random.default_rng(0)
    current = list(finalists)
    kinds = (_shaken,) if _keeps_order(problem) else (_kicked, _shaken)
    spent_s = [0.0 for _ in kinds]
    for turn in range(_SHAKES):
        if effort.is_spent:
            break
        if turn == _TURNS_OF_ALL * len(finalists):
            current = [min(current, key=by_value)]
        which = turn % len(current)
        kind = int(np.argmin(spent_s))
        before_s, before = effort.left_s, current[which]
        current[which] = kinds[kind](problem, before, generator, effort)
        is_better = current[which].value < before.value
        spent_s[kind] = 0.0 if is_better else spent_s[kind] + before_s - effort.left_s
    return min(current, key=by_value)


def _shaken(problem: Problem, start: Start, generator: np.random.Generator, effort: Effort) -> Start:
    """Other cuts for the same order."""
    valuation = Valuation(problem, start.order, effort)
    best = Refined(cuts=start.cuts, value=start.value)
    valuation.values(best.cuts[None])
    for _ in range(_SHAKES_OF_ONE):
        if effort.is_spent:
            break
        best = shake(valuation, best, generator)
    return reordered(problem, replace(start, cuts=best.cuts, value=best.value), effort)


def _kicked(problem: Problem, start: Start, generator: np.random.Generator, effort: Effort) -> Start:
    """Cuts that an order was made for are the best for it: others get an order of their own before they are judged.

    A kick may lead to something a little worse, for the next one to start from.
    """
    best = start
    for _ in range(_KICKS):
        if effort.is_spent:
            break
        valuation = Valuation(problem, start.order, effort)
        cuts = kicked(valuation, start.cuts, generator)
        if cuts is None:
            continue
        order, value = reorder(valuation, cuts, passes=2, is_near=True)
        if value > best.value * _HOPEFUL:
            continue
        found = refine(Valuation(problem, order, effort), cuts, rounds=_KICK_ROUNDS)
        if found.value > best.value * _PROMISING:
            continue
        order, value = reorder(Valuation(problem, order, effort), found.cuts, is_near=True)
        if value < best.value * _TOLERABLE:
            spec = listed(problem, start.spec.num_loops)
            start = replace(start, spec=spec, order=order, cuts=found.cuts, value=value)
            best = start if value < best.value * (1 - 1e-7) else best
    return best


def is_small(problem: Problem, begun: list[Start]) -> bool:
    """Whether all slicings can be tried out."""
    operations = len(problem.positions)
    if operations > _EXHAUSTIVE_OPERATIONS:
        return False
    orders = [*begun, *all_orders(problem)]
    return sum(comb(operations, start.order.num_stages - 1) for start in orders) <= _EXHAUSTIVE


def _all_slicings(problem: Problem, begun: list[Start]) -> Iterator[Start]:
    """Each order on the best of all slicings there are."""
    unlimited = Effort(left_s=np.inf)
    for start in begun:
        chosen = list(combinations(problem.positions.tolist(), start.order.num_stages - 1))
        cuts = np.asarray(chosen, dtype=np.int64).reshape(len(chosen), -1)
        valuation = Valuation(problem, start.order, unlimited, is_thorough=True)
        nearest = cuts[np.argsort(valuation.values(cuts), kind="stable")[:_LOOKED_AT_ALONE]]
        looked_at = (start.cuts, *nearest) if np.isfinite(start.value) else tuple(nearest)
        yield min((replace(start, cuts=c, value=valuation.exact(c)) for c in looked_at), key=by_value)
