"""The search: where to cut and in which order to run, together.

Every family starts on many slicings; the best starts are improved by turns, cuts for the order, order for the cuts;
then the best of them is shaken until the effort is spent. What is small enough is tried out whole. The plan that comes
out is lowered to the lists that ranks execute, proved to run, and executed in simulated time: that is its estimate.

Models: effort by a count of work, so that the same question always gets the same answer.
Ignores: other numbers of micro-batches or ranks: the search is asked again for each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import CostGraph, Machine, Schedule, ScheduleFamily, ScheduleSpec, StageCost
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.planner.bound import lower_bound
from pfeife_accelerate.planner.explain import does_not_fit, nothing_runs, runners_up
from pfeife_accelerate.planner.improve import improved, is_small, lifted, shaken, tried_out
from pfeife_accelerate.planner.memory import MemoryProfile
from pfeife_accelerate.planner.options import SearchOptions
from pfeife_accelerate.planner.planned import Planned
from pfeife_accelerate.planner.problem import Problem
from pfeife_accelerate.planner.recompute import with_recomputation
from pfeife_accelerate.planner.simulate import MessageBytes, simulate
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.planner.starts import Start, by_value, even_starts, exactly, starts
from pfeife_accelerate.planner.thrifty import thrifty_starts
from pfeife_accelerate.planner.valuation import MISFIT_S, Effort, Valuation
from pfeife_accelerate.schedule import build, lower
from pfeife_accelerate.schedule.order import order_of, schedule_of

__all__ = ["make_plan"]

_LOG = get_logger(__name__)
_FEW_S, _MANY_S = 6.0, 5.5  # seconds of effort for a model of ordinary size
_FIRST_SHARE = 0.65  # of the effort, for fewer micro-batches
_LIFTED = 1  # starts that go on with all micro-batches


def make_plan(
    graph: CostGraph,
    machine: Machine,
    num_ranks: int,
    num_microbatches: int,
    options: SearchOptions | None = None,
) -> Planned:
    """The fastest plan found that runs and fits; `graph` has the costs of one of the `num_microbatches`.

    Raises: PfeifeError PF301 where the model has too few cuts, PF302 where nothing fits into memory, PF204 where no
    order that the user allows can run, PF210 where there is no rank or no micro-batch.
    """
    # Any schedule refuses numbers below one, before there are arrays of such sizes.
    ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=num_ranks, num_microbatches=num_microbatches)
    problem = Problem(
        graph=graph,
        machine=machine,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        options=options or SearchOptions(),
    )
    effort = Effort(left_s=_effort_s(problem))
    best, begun = _searched(problem, effort)
    best = replace(best, value=Valuation(problem, best.order, effort).exact(best.cuts))
    recompute: tuple[int, ...] = ()
    thrifty = thrifty_starts(problem) if best.value >= MISFIT_S else []
    best = min((best, *thrifty), key=by_value)
    if problem.options.recompute == "auto" and any(start.value >= MISFIT_S for start in (best, *begun)):
        # What fits as it is may be slower than what fits only where some stages recompute.
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
    # With few micro-batches a step is short and its best plan hard to find: there is no steady state to fill.
    most = _FEW_S if problem.num_microbatches <= 2 * problem.num_ranks else _MANY_S
    return min(0.1 + 2e-5 * operations**2 + 1e-4 * size, most) + min(1.5e-8 * size, 20.0)


def _searched(problem: Problem, effort: Effort) -> tuple[Start, list[Start]]:
    """The best plan found, and the starts of all families."""
    fewer, is_full = _with_fewer_microbatches(problem), problem.options.effort == "full"
    begun = starts(fewer, effort)
    if not begun:
        raise nothing_runs(problem)
    if problem.options.cuts is None and is_full and is_small(problem, begun):
        begun = begun if fewer is problem else starts(problem, effort)
        return tried_out(problem, begun, effort), begun
    if fewer is problem:
        return (improved(problem, begun, effort) if is_full else begun[0]), begun
    first = effort.part(_FIRST_SHARE)
    chosen = [improved(fewer, begun, first)] if is_full else []
    effort.spend(-first.left_s)
    families = {start.family: start for start in reversed(begun)}
    lifts = [lifted(problem, start, effort) for start in (*chosen, *families.values())]
    lifts += even_starts(problem, effort)[:2]
    found = exactly(problem, [start for start in lifts if start is not None], effort)
    if not found:  # rare: what runs with few micro-batches runs with more
        begun = starts(problem, effort)
        return improved(problem, begun, effort), begun
    if is_full:
        return shaken(problem, found[:_LIFTED], effort), found
    return found[0], found


def _with_fewer_microbatches(problem: Problem) -> Problem:
    """The same question with as many micro-batches as show the ramps; itself where that does not save much."""
    enough = 2 * problem.num_ranks
    is_free = problem.options.microbatches_per_loop is None and problem.options.cuts is None
    if not is_free or problem.num_microbatches < 2 * enough:
        return problem
    return replace(problem, num_microbatches=enough, num_beyond=problem.num_microbatches - enough)


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
        peer = interval.action.peer  # a device is busy with what it copies for others, too
        if peer is None or problem.machine.link_of(interval.rank, peer).is_copied:
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
    table = np.stack(
        (
            slices.forward_s,
            sum(backward),
            backward[1] if slices.problem.is_split else slices.backward_weight_s,
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
