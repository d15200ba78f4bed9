"""Why: why the other families lost, and why nothing fits.

Models: where a plan's ranks idle, compared with the winner's; the smallest change that would fit, each tried out.
Ignores: what the user could change about the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import ScheduleFamily
from pfeife_accelerate.planner.memory import MemoryProfile, RankMemory
from pfeife_accelerate.planner.planned import RunnerUp
from pfeife_accelerate.planner.problem import Problem
from pfeife_accelerate.planner.recompute import with_recomputation
from pfeife_accelerate.planner.starts import Start, loops, specs, starts
from pfeife_accelerate.planner.thrifty import thrifty_starts
from pfeife_accelerate.planner.valuation import MISFIT_S, Effort, Valuation
from pfeife_accelerate.schedule import build, chain_messages, lower, validate

__all__ = ["does_not_fit", "nothing_runs", "runners_up"]

_GIB = 2.0**30
_EQUAL = 1e-9  # relative: times are sums of the same numbers in another order


@dataclass(frozen=True, kw_only=True)
class _Idle:
    """What makes a step longer than the work of a mean rank, in seconds."""

    imbalance_s: float
    ramps_s: float
    waits_s: float


def runners_up(problem: Problem, best: Start, begun: Sequence[Start], recompute: Sequence[int]) -> tuple[RunnerUp, ...]:
    """The best start of every other family, the fastest first, with the reason why it lost."""
    families: dict[str, Start] = {}
    for start in begun:
        families.setdefault(start.family, start)
    winner = _idle(problem, best, recompute)
    rows = []
    for family, start in families.items():
        if family == best.family:
            continue
        if start.value >= MISFIT_S:
            rows.append(RunnerUp(family=family, estimate_s=None, why=_misfit(problem, start)))
        else:
            rows.append(
                RunnerUp(family=family, estimate_s=start.value, why=_reason(problem, start, best.value, winner))
            )
    return tuple(sorted(rows, key=lambda row: (row.estimate_s is None, row.estimate_s or 0.0)))


def _idle(problem: Problem, start: Start, recompute: Sequence[int] = ()) -> _Idle:
    valuation = Valuation(problem, start.order, Effort(left_s=np.inf), recompute)
    slices = valuation.slices(start.cuts[None])
    graph, rows = valuation.graph(slices.messages), slices.durations
    ends = graph.end_of_nodes(rows)
    lasts = np.repeat(rows[: start.order.num_kinds * start.order.num_stages, 0], start.order.num_microbatches)
    work = np.asarray([lasts[jobs].sum() for jobs in start.order.jobs])
    first = np.asarray([ends[jobs[0]] - lasts[jobs[0]] for jobs in start.order.jobs])
    last = np.asarray([ends[jobs[-1]] for jobs in start.order.jobs])
    total = float(last.max())
    ramps = first + total - last
    return _Idle(
        imbalance_s=float(work.max() - work.mean()),
        ramps_s=float(ramps.mean()),
        waits_s=float((total - work - ramps).mean()),
    )


def _reason(problem: Problem, start: Start, best_s: float, winner: _Idle) -> str:
    lost_s = start.value - best_s
    number = start.spec.num_loops
    stages = f"with {number} stage{'s' * (number > 1)} a rank"
    if lost_s <= _EQUAL * best_s:
        return f"as fast, {stages}"
    idle = _idle(problem, start)
    parts = {
        "ranks wait longer at the start and the end": idle.ramps_s - winner.ramps_s,
        "ranks wait longer in between": idle.waits_s - winner.waits_s,
        "the slowest rank has more to do": idle.imbalance_s - winner.imbalance_s,
    }
    most = max(parts, key=lambda text: parts[text])
    return f"{lost_s * 1e3:.2f} ms more {stages}: {most}"


def _memory(problem: Problem, start: Start) -> tuple[RankMemory, ...]:
    valuation = Valuation(problem, start.order, Effort(left_s=np.inf))
    return MemoryProfile(start.order).items(valuation.slices(start.cuts[None]))


def _misfit(problem: Problem, start: Start) -> str:
    memory = _memory(problem, start)
    worst = max(range(len(memory)), key=lambda rank: memory[rank].excess_bytes)
    return f"does not fit: {memory[worst].excess_bytes / _GIB:.2f} GiB too many on rank {worst}"


# -- refusals ----------------------------------------------------------------------------------------------------------


def nothing_runs(problem: Problem) -> PfeifeError:
    """Every order that the user allows deadlocks: the picture of the first."""
    schedule = build(next(spec for num_loops in loops(problem) for spec in specs(problem, num_loops)))
    try:
        validate(lower(schedule, chain_messages(schedule.stage_ranks)), chain_messages(schedule.stage_ranks))
    except PfeifeError as error:
        return error
    raise AssertionError(schedule.spec)


def does_not_fit(problem: Problem, nearest: Start) -> PfeifeError:
    """By how much the nearest plan exceeds the memory of which rank, and the smallest change that fits."""
    memory = _memory(problem, nearest)
    rows = [
        f"rank {rank} needs {m.peak_bytes} bytes ({m.params_bytes} parameters, {m.state_bytes} gradients and optimizer "
        f"state, {m.activation_bytes} activations, {m.workspace_bytes} workspace, {m.buffer_bytes} messages), "
        f"may use {m.limit_bytes}: {m.excess_bytes} too many"
        for rank, m in enumerate(memory)
        if m.excess_bytes > 0
    ]
    total = sum(m.peak_bytes for m in memory)
    least = min(m.limit_bytes for m in memory)
    return PfeifeError(
        id="PF302",
        what=f"no plan fits into memory; the nearest one exceeds it on {len(rows)} of {problem.num_ranks} ranks",
        where="\n".join(rows),
        why=f"all stages together need {total} bytes, the devices give {least} each",
        hints=tuple(_changes(problem)),
    )


def _changes(problem: Problem) -> list[str]:
    """The smallest change of each kind that fits, tried out quickly."""
    found = []
    if problem.options.recompute == "none" and _fits(problem, recompute=True):
        found.append("recomputation of activations (recompute: auto)")
    number = problem.num_microbatches
    for factor in (2, 4, 8):
        if _fits(_smaller_microbatches(problem, factor)):
            found.append(f"{number * factor} micro-batches, each {factor} times smaller")
            break
    most = len(problem.positions) + 1 if problem.options.cuts is None else 0
    least_loops = 2 if problem.options.family is ScheduleFamily.ZB_V else 1
    # Of several kinds of device nobody knows which one would be added.
    more = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 56, 120, 248) if len(problem.machine.devices) == 1 else ()
    for ranks in (problem.num_ranks + extra for extra in more):
        if ranks * (problem.options.num_loops or least_loops) <= most and _fits(replace(problem, num_ranks=ranks)):
            found.append(f"{ranks} processes")
            break
    if found:
        return found
    alone = max(
        node.saved_bytes
        + node.workspace_bytes
        + sum(use.state_bytes for use in {u.owner: u for u in node.params}.values())
        for node in problem.graph.nodes
    )
    nothing = "a device with more memory, or a smaller model"
    return [f"{nothing}: one operation alone needs {alone} bytes" if alone > problem.limits.max() else nothing]


def _fits(problem: Problem, *, recompute: bool = False) -> bool:
    options = problem.options
    wishes = (
        options.family, options.num_loops, options.microbatches_per_loop, options.prefetch_forwards, options.cuts,
    )  # fmt: skip
    is_free = all(wish is None for wish in wishes)
    if not recompute and is_free and options.recompute == "none":
        thrifty = thrifty_starts(replace(problem, options=replace(options, effort="quick")))
        if any(start.value < MISFIT_S for start in thrifty):
            return True
    if not recompute and is_free:
        # Of all that the search would try this needs about the least memory.
        options = replace(options, schedule="1f1b", prefetch_forwards=0)
    quick = replace(problem, options=replace(options, effort="quick"))
    begun = starts(quick, Effort(left_s=np.inf))
    if not begun:
        return False
    start = with_recomputation(quick, begun)[0] if recompute or options.recompute == "auto" else begun[0]
    return start.value < MISFIT_S


def _smaller_microbatches(problem: Problem, factor: int) -> Problem:
    """Micro-batches of a fraction of the rows: what grows with them shrinks, parameters stay."""
    nodes = tuple(
        replace(node, saved_bytes=node.saved_bytes // factor, workspace_bytes=node.workspace_bytes // factor)
        for node in problem.graph.nodes
    )
    values = tuple(
        replace(value, num_bytes=value.num_bytes // factor, gradient_bytes=value.gradient_bytes // factor)
        for value in problem.graph.values
    )
    graph = replace(problem.graph, nodes=nodes, values=values)
    return replace(problem, graph=graph, num_microbatches=problem.num_microbatches * factor)
