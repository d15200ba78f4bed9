"""The search: where to cut and in which order to run, together.

Every family starts on many slicings; the best starts are improved by turns, cuts for the order, order for the cuts;
then the best of them is shaken until the effort is spent. What is small enough is tried out whole. The plan that comes
out is lowered to the lists that ranks execute, proved to run, and executed in simulated time: that is its estimate.

Models: effort by a count of work, so that the same question always gets the same answer.
Ignores: other numbers of micro-batches or ranks: the search is asked again for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import CostGraph, Machine, Schedule, ScheduleFamily, ScheduleSpec, StageCost
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.planner.bound import lower_bound
from pfeife_accelerate.planner.explain import does_not_fit, nothing_runs, runners_up
from pfeife_accelerate.planner.memory import MemoryProfile
from pfeife_accelerate.planner.options import SearchOptions
from pfeife_accelerate.planner.planned import Planned
from pfeife_accelerate.planner.problem import Problem
from pfeife_accelerate.planner.recompute import with_recomputation
from pfeife_accelerate.planner.refine import Refined, refine, shake
from pfeife_accelerate.planner.reorder import reorder
from pfeife_accelerate.planner.simulate import MessageBytes, simulate
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.planner.starts import Start, starting_cuts, starts
from pfeife_accelerate.planner.valuation import MISFIT_S, Effort, Valuation
from pfeife_accelerate.schedule import build, lower
from pfeife_accelerate.schedule.order import order_of, schedule_of

__all__ = ["make_plan"]

_LOG = get_logger(__name__)
_BEAM = 5  # starts that are improved where the cuts are given
_FINE = 10  # starts that see all profiles, and are improved
_FIRST_ROUNDS = 4
_SHARE = 0.4  # of what is left, that one such selection may take
_TURNS = 4
_SHAKES = 400
_REORDER_EVERY = 8
_FINALISTS = 2
_TURNS_OF_ALL = 2
_EXHAUSTIVE = 60_000  # slicings times orders that are tried out rather than searched
_EXHAUSTIVE_OPERATIONS = 24


def make_plan(
    graph: CostGraph,
    machine: Machine,
    num_ranks: int,
    num_microbatches: int,
    options: SearchOptions | None = None,
) -> Planned:
    """The fastest plan found that runs and fits; `graph` has the costs of one of the `num_microbatches`.

    Raises: PfeifeError PF301 where the model has too few cuts, PF302 where nothing fits into memory, PF204 where no
    order that the user allows can run.
    """
    problem = Problem(
        graph=graph,
        machine=machine,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        options=options or SearchOptions(),
    )
    effort = Effort(left_s=_effort_s(problem))
    begun = starts(problem, effort)
    if not begun:
        raise nothing_runs(problem)
    best = _improved(problem, begun, effort) if problem.options.effort == "full" else begun[0]
    recompute: tuple[int, ...] = ()
    if best.value >= MISFIT_S and problem.options.recompute == "auto":
        best, recompute = with_recomputation(problem, [best, *begun])
    if best.value >= MISFIT_S:
        raise does_not_fit(problem, best)
    planned = _planned(problem, best, recompute, begun)
    _LOG.info("plan: %s, cuts %s, %.4g s a step", best.spec, planned.cuts, planned.estimate_s)
    return planned


def _effort_s(problem: Problem) -> float:
    """Seconds of an ordinary core that the search may take: enough to settle small models, bounded for large ones."""
    operations = len(problem.graph.nodes)
    size = operations * problem.num_ranks * problem.num_microbatches
    return min(0.1 + 1.6e-3 * operations + 5e-5 * size, 3.1) + min(1.5e-8 * size, 20.0)


# -- improving ---------------------------------------------------------------------------------------------------------


def _improved(problem: Problem, begun: list[Start], effort: Effort) -> Start:
    """The best that can be made of the starts."""
    if problem.options.cuts is not None:
        finished = [_reordered(problem, start, effort) for start in begun[:_BEAM]]
        return min(finished, key=lambda start: start.value)
    if _is_small(problem, begun):
        return _reordered(problem, min(_all_slicings(problem, begun), key=lambda start: start.value), effort)
    chosen = [_on_all_profiles(problem, start, effort) for start in _varied(begun, _FINE)]
    chosen.sort(key=lambda start: start.value)
    # The chosen ones get some rounds each, the better half of them more, until one is left to be shaken. What is large
    # leaves time for the most promising of them alone.
    rounds, finalists = _FIRST_ROUNDS, chosen[:1]
    while len(chosen) > 1 and not effort.is_spent:
        least_s = effort.left_s * (1 - _SHARE)
        turned: list[Start] = []
        for start in chosen:
            if len(turned) < 2 or effort.left_s > least_s:
                turned.append(_by_turns(problem, start, effort, rounds))
        chosen = sorted(turned, key=lambda start: start.value)[: len(turned) // 2]
        rounds *= 4
        finalists = sorted(turned, key=lambda start: start.value)[:_FINALISTS]
    return _shaken(problem, finalists, effort)


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
    values = Valuation(problem, start.order, effort).values(cuts)
    best = int(values.argmin())
    return replace(start, cuts=cuts[best], value=float(values[best])) if values[best] < start.value else start


def _by_turns(problem: Problem, start: Start, effort: Effort, rounds: int) -> Start:
    """Cuts for the order, order for the cuts, until neither helps or the rounds are over."""
    current = start
    for _ in range(_TURNS):
        before = current.value
        found = refine(Valuation(problem, current.order, effort), current.cuts, rounds=rounds)
        if found.value <= current.value:
            current = replace(current, cuts=found.cuts, value=found.value)
        current = _reordered(problem, current, effort)
        if current.value >= before * (1 - 1e-6) or effort.is_spent or rounds < 16:
            break
    return current


def _reordered(problem: Problem, start: Start, effort: Effort) -> Start:
    """The start with a better order, where the user leaves the order to us."""
    if problem.options.family not in (None, ScheduleFamily.LIST) or _fixes_order(problem.options):
        return start
    order, value = reorder(Valuation(problem, start.order, effort), start.cuts)
    if value >= start.value * (1 - 1e-9):
        return start
    listed = ScheduleSpec(
        family=ScheduleFamily.LIST,
        num_ranks=problem.num_ranks,
        num_microbatches=problem.num_microbatches,
        num_loops=start.spec.num_loops,
    )
    return replace(start, spec=listed, order=order, value=value)


def _fixes_order(options: SearchOptions) -> bool:
    return options.microbatches_per_loop is not None or options.prefetch_forwards is not None


def _shaken(problem: Problem, finalists: list[Start], effort: Effort) -> Start:
    """Random moves and descents from the finalists by turns, with the same random numbers each time."""
    generator = np.random.default_rng(0)
    current = list(finalists)
    for turn in range(_SHAKES):
        if effort.is_spent:
            break
        if turn == _TURNS_OF_ALL * len(finalists):
            current = [min(current, key=lambda start: start.value)]
        which = turn % len(current)
        start = current[which]
        valuation = Valuation(problem, start.order, effort)
        best = Refined(cuts=start.cuts, value=start.value)
        valuation.values(best.cuts[None])
        for _ in range(_REORDER_EVERY):
            if effort.is_spent:
                break
            best = shake(valuation, best, generator)
        shaken = replace(start, cuts=best.cuts, value=best.value)
        current[which] = _reordered(problem, shaken, effort)
    return min(current, key=lambda start: start.value)


def _is_small(problem: Problem, begun: list[Start]) -> bool:
    operations = len(problem.positions)
    if operations > _EXHAUSTIVE_OPERATIONS:
        return False
    number = sum(comb(operations, start.order.num_stages - 1) for start in begun)
    return number <= _EXHAUSTIVE


def _all_slicings(problem: Problem, begun: list[Start]) -> Iterator[Start]:
    """Each order on the best of all slicings there are."""
    unlimited = Effort(left_s=np.inf)
    for start in begun:
        chosen = list(combinations(problem.positions.tolist(), start.order.num_stages - 1))
        cuts = np.asarray(chosen, dtype=np.int64).reshape(len(chosen), -1)
        values = Valuation(problem, start.order, unlimited).values(cuts)
        best = int(values.argmin())
        yield replace(start, cuts=cuts[best], value=float(values[best]))


# -- the result --------------------------------------------------------------------------------------------------------


def _planned(problem: Problem, best: Start, recompute: tuple[int, ...], begun: list[Start]) -> Planned:
    """The plan, after it has been executed as ranks will execute it."""
    slices = Slices(problem, best.cuts[None], best.order.stage_ranks, recompute)
    schedule = _schedule(best)
    stages = _stage_costs(slices)
    forward, back = slices.message_bytes
    sizes = tuple(
        MessageBytes(forward_bytes=round(there), gradient_bytes=round(gradient))
        for there, gradient in zip(forward[:, 0].tolist(), back[:, 0].tolist(), strict=True)
    )
    timeline = simulate(lower(schedule, slices.messages), stages, slices.messages, sizes, problem.machine)
    ends = np.zeros(problem.num_ranks)
    for interval in timeline.intervals:
        if interval.action.kind.is_compute:
            ends[interval.rank] = max(ends[interval.rank], interval.end_s)
    estimate_s = float((ends + slices.optimizer_s[:, 0]).max())
    if abs(estimate_s - best.value) > 1e-6 * best.value:
        raise InternalError(
            id="PF311",
            what=f"the plan takes {estimate_s} s as executed, {best.value} s as searched",
            where=str(best.spec),
        )
    return Planned(
        graph_fingerprint=problem.graph.fingerprint,
        num_operations=len(problem.graph.nodes),
        cuts=tuple(best.cuts.tolist()),
        schedule=schedule,
        recompute=recompute,
        stages=stages,
        estimate_s=estimate_s,
        lower_bound=lower_bound(problem),
        memory=MemoryProfile(best.order).items(slices),
        timeline=timeline,
        runners_up=runners_up(problem, best, begun, recompute),
    )


def _schedule(best: Start) -> Schedule:
    if best.spec.family is ScheduleFamily.LIST:
        return schedule_of(best.order, best.spec)
    schedule = build(best.spec)
    is_whole = not best.order.is_split or order_of(schedule).is_split
    return schedule if is_whole else schedule_of(best.order, best.spec)


def _stage_costs(slices: Slices) -> tuple[StageCost, ...]:
    backward = slices.backward_s
    weight = backward[1] if len(backward) > 1 else slices.backward_weight_s
    whole = backward[0] + backward[1] if len(backward) > 1 else backward[0]
    table = np.stack(
        (
            slices.forward_s,
            whole,
            weight,
            slices.stage_param_bytes,
            slices.saved_bytes,
            np.maximum(slices.forward_peak_bytes - slices.saved_bytes, slices.backward_workspace_bytes),
        )
    )[:, :, 0]
    return tuple(
        StageCost(
            forward_s=forward_s,
            backward_s=backward_s,
            backward_weight_s=weight_s,
            param_bytes=round(param),
            saved_bytes=round(saved),
            workspace_bytes=round(workspace),
        )
        for forward_s, backward_s, weight_s, param, saved, workspace in table.T.tolist()
    )
