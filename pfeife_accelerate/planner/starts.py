"""The orders and slicings that the search starts from: every family, several numbers of loops, several profiles.

Models: what the user fixes is obeyed; a family that the user names meets all the user's numbers, and refuses those it
has no use for. Ignores: how good a start is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.planner.problem import Ints, Problem
from pfeife_accelerate.planner.shapes import equal_time_cuts, profiles, shaped_cuts
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.planner.valuation import MISFIT_S, Effort, Valuation
from pfeife_accelerate.schedule.families import looped_order, numbered
from pfeife_accelerate.schedule.order import Order, split_backwards

__all__ = [
    "Start", "all_orders", "as_wanted", "by_value", "even_starts", "exactly", "family_name", "listed", "loops",
    "order_for", "specs", "starting_cuts", "starts",
]  # fmt: skip

_LOOPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_MOST_JOBS = 40_000  # of an order with several loops; with one there may be more
_ENOUGH_STAGES = 128
_FEW_POSITIONS = 24  # where all cuts can be tried, other orders than the likeliest may have the best of them
_MOST_ROUNDS = 14
_KEPT = 14  # starts that go on
_PLAIN_LOOPS = 8
_MOST_ALL = 24  # ranks times micro-batches of which every order is looked at
_NO_CUTS: Ints = np.empty(0, dtype=np.int64)
_MOST_BETWEEN = 60


@dataclass(frozen=True, kw_only=True)
class Start:
    """An order on cuts, with its value."""

    spec: ScheduleSpec
    order: Order
    cuts: Ints
    value: float
    peak_bytes: float = 0.0  #: of the fullest rank, where it has been looked at

    @property
    def family(self) -> str:
        """How the table of families calls it."""
        return family_name(self.spec)


def family_name(spec: ScheduleSpec) -> str:
    """The family, with what tells its members apart."""
    name = spec.family.value
    if spec.family is ScheduleFamily.LOOPED and spec.num_loops == 1:
        return "1f1b"
    if spec.family is ScheduleFamily.ONE_F_ONE_B and spec.prefetch_forwards:
        return "1f1b with prefetch"
    return name


def loops(problem: Problem) -> tuple[int, ...]:
    """Stages per rank to try."""
    options, ranks = problem.options, problem.num_ranks
    most = len(problem.positions) + 1
    if options.cuts is not None:
        return (_loops_of_cuts(problem, options.cuts),)
    if options.num_loops is not None:
        if options.num_loops * ranks > most:
            raise _too_few_cuts(problem, options.num_loops * ranks)
        return (options.num_loops,)
    if ranks > most:
        raise _too_few_cuts(problem, ranks)
    family = options.family
    if family in (ScheduleFamily.ONE_F_ONE_B, ScheduleFamily.ZB_H1) or ranks == 1:
        return (1,)
    if family is ScheduleFamily.ZB_V:
        if 2 * ranks > most:
            raise _too_few_cuts(problem, 2 * ranks)
        return (2,)
    return tuple(v for v in _LOOPS if v == 1 or (v * ranks <= most and _is_looked_at(problem, v)))


def _loops_of_cuts(problem: Problem, cuts: tuple[int, ...]) -> int:
    legal, wanted = set(problem.graph.legal_cuts), problem.options.num_loops
    num_loops, rest = divmod(len(cuts) + 1, problem.num_ranks)
    wrong = [cut for cut in cuts if cut not in legal]
    problems = (
        (bool(wrong), f"no cut is legal at {wrong}"),
        (any(cut >= later for cut, later in pairwise(cuts)), "each cut comes after the one before it"),
        (bool(rest), f"{len(cuts) + 1} stages are no multiple of {problem.num_ranks} ranks"),
        (wanted not in (None, num_loops), f"{len(cuts) + 1} stages are {num_loops} a rank, not num_loops={wanted}"),
    )
    for is_wrong, why in problems:
        if is_wrong:
            raise PfeifeError(id="PF308", what=f"impossible cuts {list(cuts)}", why=why)
    return num_loops


def _is_looked_at(problem: Problem, num_loops: int) -> bool:
    stages = num_loops * problem.num_ranks
    jobs = 2 * stages * problem.num_microbatches
    return jobs <= _MOST_JOBS and (stages <= _ENOUGH_STAGES or num_loops <= 2)


def _too_few_cuts(problem: Problem, num_stages: int) -> PfeifeError:
    most = len(problem.graph.legal_cuts) + 1
    return PfeifeError(
        id="PF301",
        what=f"the model cannot be cut into {num_stages} stages",
        where=f"{len(problem.graph.nodes)} operations, {most - 1} positions where a cut is legal",
        why=f"{num_stages} stages need {num_stages - 1} cuts",
        hints=(f"at most {most} stages: fewer processes or num_loops=1",),
    )


def specs(problem: Problem, num_loops: int) -> Iterator[ScheduleSpec]:
    """The members of families to try with so many stages a rank."""
    options, ranks, microbatches = problem.options, problem.num_ranks, problem.num_microbatches
    family, per_loop, prefetch = options.family, options.microbatches_per_loop, options.prefetch_forwards
    base = ScheduleSpec(
        family=ScheduleFamily.GPIPE, num_ranks=ranks, num_microbatches=microbatches, num_loops=num_loops
    )
    is_free = family in (None, ScheduleFamily.LIST)
    if family is not None and not is_free and family not in (ScheduleFamily.ONE_F_ONE_B, ScheduleFamily.LOOPED):
        yield replace(base, family=family, microbatches_per_loop=per_loop, prefetch_forwards=prefetch or 0)
        return
    prefetches = (ranks - 1, 0) if prefetch is None else (prefetch,)
    if is_free and per_loop is None and not prefetch and num_loops == 1:
        yield base
    if family is ScheduleFamily.ONE_F_ONE_B or (is_free and per_loop is None and num_loops == 1):
        for forwards in dict.fromkeys((*prefetches, *((ranks // 2,) if prefetch is None else ()))):
            yield replace(
                base, family=ScheduleFamily.ONE_F_ONE_B, microbatches_per_loop=per_loop, prefetch_forwards=forwards
            )
    if family is ScheduleFamily.LOOPED or (is_free and (per_loop is not None or num_loops > 1)):
        blocks = dict.fromkeys((min(ranks, microbatches), microbatches, 1)) if per_loop is None else (per_loop,)
        for block in blocks:
            for forwards in dict.fromkeys(prefetches):
                yield replace(
                    base, family=ScheduleFamily.LOOPED, microbatches_per_loop=block, prefetch_forwards=forwards
                )
    if is_free and per_loop is None and prefetch is None and num_loops == 2 and ranks > 1:
        yield replace(base, family=ScheduleFamily.WAVE)
        if problem.is_split:
            yield replace(base, family=ScheduleFamily.ZB_V)
    if is_free and problem.is_split and num_loops == 1 and per_loop is None and prefetch is None:
        yield replace(base, family=ScheduleFamily.ZB_H1)


def starting_cuts(problem: Problem, num_stages: int, *, fine: bool) -> Ints:
    """Slicings to value: equal time, profiles around it, equal memory; the user's own alone where there are some."""
    if problem.options.cuts is not None:
        return np.asarray([problem.options.cuts], dtype=np.int64)
    if num_stages == 1:
        return np.empty((1, 0), dtype=np.int64)
    weights = profiles(problem.num_ranks, num_stages, fine=fine)
    even = np.ones((1, num_stages))
    memory = problem.state_bytes + problem.saved_bytes
    return np.unique(
        np.concatenate(
            (
                equal_time_cuts(problem, num_stages)[None],
                shaped_cuts(problem, weights),
                shaped_cuts(problem, even, memory),
                shaped_cuts(problem, even, problem.state_bytes + problem.saved_bytes * problem.num_microbatches),
            )
        ),
        axis=0,
    )


def starts(problem: Problem, effort: Effort) -> list[Start]:
    """Every order on the best of the starting cuts, the best first; of equally fast ones those with less memory.

    Less prefetch than there can be is looked at where that does not fit, and with one stage a rank.
    """
    found: list[Start] = []
    for num_loops in loops(problem):
        if found and effort.is_spent:
            break
        cuts = starting_cuts(problem, num_loops * problem.num_ranks, fine=False)
        placements: dict[tuple[int, ...], list[Slices]] = {}
        fitting: set[int | None] = set()
        is_tight = False
        for spec in specs(problem, num_loops):
            is_looped = spec.family is ScheduleFamily.LOOPED and problem.options.prefetch_forwards is None
            if is_looped and spec.microbatches_per_loop in fitting and problem.options.family is None and not is_tight:
                continue
            if _is_for_little_memory(problem, spec) and not is_tight:
                continue
            order = order_for(problem, spec)
            ranks = order.stage_ranks
            if ranks not in placements:
                placements[ranks] = [
                    Slices(problem, cuts[i : i + 64], ranks, nearest_only=True) for i in range(0, len(cuts), 64)
                ]
            valuation = Valuation(problem, order, effort)
            values = np.concatenate([valuation.value(slices) for slices in placements[ranks]])
            best = int(values.argmin())
            is_tight |= len(problem.positions) <= _FEW_POSITIONS and bool((values >= MISFIT_S).any())
            found.append(Start(spec=spec, order=order, cuts=cuts[best], value=float(values[best])))
            if is_looped and values[best] < MISFIT_S:
                fitting.add(spec.microbatches_per_loop)
    found += _between_loops(problem, effort)
    return exactly(problem, [start for start in found if np.isfinite(start.value)], effort)


def even_starts(problem: Problem, effort: Effort) -> list[Start]:
    """The families on equal-time cuts alone: what others would plan, so that nothing slower is ever planned here."""
    found: list[Start] = []
    for num_loops in loops(problem):
        if num_loops > _PLAIN_LOOPS and found:
            break
        cuts = equal_time_cuts(problem, num_loops * problem.num_ranks)
        for spec in specs(problem, num_loops):
            if spec.family in (ScheduleFamily.LOOPED, ScheduleFamily.ONE_F_ONE_B):
                order = order_for(problem, spec)
                value = float(Valuation(problem, order, effort).values(cuts[None])[0])
                found.append(Start(spec=spec, order=order, cuts=cuts, value=value))
    return sorted((start for start in found if np.isfinite(start.value)), key=by_value)


def all_orders(problem: Problem) -> list[Start]:
    """Every member of the looped family that the user allows, not yet on any cuts; of a small problem alone."""
    ranks, number = problem.num_ranks, problem.num_microbatches
    options, found = problem.options, []
    if options.microbatches_per_loop or options.prefetch_forwards is not None or ranks * number > _MOST_ALL:
        return []
    for num_loops in loops(problem):
        for block in range(1, number + 1) if num_loops > 1 else (number,):
            for prefetch in range(ranks):
                spec = ScheduleSpec(
                    family=ScheduleFamily.LOOPED, num_ranks=ranks, num_microbatches=number, num_loops=num_loops,
                    microbatches_per_loop=block, prefetch_forwards=prefetch,
                )  # fmt: skip
                found.append(Start(spec=spec, order=order_for(problem, spec), cuts=_NO_CUTS, value=np.inf))
    return found


def exactly(problem: Problem, found: list[Start], effort: Effort) -> list[Start]:
    """The best of all, and the best of each family, with all that they send: the first look left some out."""
    found.sort(key=by_value)
    first = {start.family: start for start in reversed(found)}
    chosen = [start for number, start in enumerate(found) if number < _KEPT or first[start.family] is start]
    exact = []
    for start in chosen:
        valuation = Valuation(problem, start.order, effort)
        value = valuation.exact(start.cuts)
        peak = float(valuation.memory.peaks(valuation.slices(start.cuts[None])).max())
        exact.append(replace(start, value=value, peak_bytes=peak))
    return sorted((start for start in exact if np.isfinite(start.value)), key=by_value)


def _is_for_little_memory(problem: Problem, spec: ScheduleSpec) -> bool:
    """Blocks of single micro-batches keep the least, and are seldom fast."""
    block = spec.microbatches_per_loop
    return (
        block == 1
        and problem.options.microbatches_per_loop is None
        and spec.block < min(spec.num_ranks, spec.num_microbatches)
    )


def by_value(start: Start) -> tuple[float, float]:
    """Sums of the same times in another order differ in their last digits: these do not count, memory does then."""
    return float(f"{start.value:.9g}"), start.peak_bytes


def _between_loops(problem: Problem, effort: Effort) -> Iterator[Start]:
    """Looped orders whose last round does not reach all ranks: such a number of stages may suit the model's layers.

    With many micro-batches the ranks that have a stage more would be the slowest for too long.
    """
    options, ranks, number = problem.options, problem.num_ranks, problem.num_microbatches
    is_free = options.family in (None, ScheduleFamily.LIST) and options.cuts is None and options.num_loops is None
    if not is_free or options.microbatches_per_loop or options.prefetch_forwards or number > 2 * ranks:
        return
    most = min(_MOST_ROUNDS * ranks, _ENOUGH_STAGES, len(problem.positions) + 1)
    numbers = [stages for stages in range(ranks + 1, most) if stages % ranks]
    for stages in numbers[:: len(numbers) // _MOST_BETWEEN + 1]:
        if effort.is_spent:
            break
        spec = listed(problem, num_loops=-(-stages // ranks))
        placement = tuple(stage % ranks for stage in range(stages))
        order = as_wanted(problem, looped_order(placement, number, block=min(ranks, number), prefetch=ranks - 1))
        cuts = np.concatenate((equal_time_cuts(problem, stages)[None], shaped_cuts(problem, np.ones((1, stages)))))
        slices = Slices(problem, cuts, placement, nearest_only=True)
        values = Valuation(problem, order, effort).value(slices)
        best = int(values.argmin())
        yield Start(spec=spec, order=order, cuts=cuts[best], value=float(values[best]))


def order_for(problem: Problem, spec: ScheduleSpec) -> Order:
    """The order of a family, in halves where the problem wants that."""
    return as_wanted(problem, numbered(spec))


def as_wanted(problem: Problem, order: Order) -> Order:
    """The order, its backwards in halves where the problem wants that."""
    return split_backwards(order) if problem.is_split and not order.is_split else order


def listed(problem: Problem, num_loops: int) -> ScheduleSpec:
    """What is said of an order that no formula gives."""
    return ScheduleSpec(
        family=ScheduleFamily.LIST,
        num_ranks=problem.num_ranks,
        num_microbatches=problem.num_microbatches,
        num_loops=num_loops,
    )
