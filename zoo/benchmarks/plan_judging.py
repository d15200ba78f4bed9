"""One plan of ours, and what the event simulator says of it.

Models: the makespan and memory of the plan's own list of actions; what the planner claimed beside it. A claim that does
not hold (memory, estimate, bound) is a problem with a text, never a number that is quietly left out.
Ignores: how the plan was found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from event_simulator import simulate

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, Machine
from pfeife_accelerate.planner import SearchOptions, make_plan

__all__ = ["Judged", "judge"]

_EQUAL = 1e-6  # relative: estimates and simulated times are sums of the same numbers in another order


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan's simulated time and the planner's claims; `problems` is empty where they agree."""

    makespan_s: float = float("inf")
    bound_s: float = 0.0
    planning_s: float  #: of this process: other programs on the machine count little
    order: str = "-"  #: the family, with the stages a rank has
    problems: tuple[str, ...] = ()


def judge(graph: CostGraph, machine: Machine, ranks: int, microbatches: int, options: SearchOptions) -> Judged:
    """Plan, and simulate the plan. `machine` has the memory limit; `options` should allow all of it."""
    start_s = time.process_time()
    try:
        planned = make_plan(graph, machine, ranks, microbatches, options)
    except PfeifeError as error:
        return Judged(planning_s=time.process_time() - start_s, problems=(f"refused: {error.id} {error.what}",))
    planning_s = time.process_time() - start_s
    per_rank = tuple(tuple(map(str, actions)) for actions in planned.schedule.per_rank)
    outcome = simulate(graph, machine, planned.cuts, planned.stage_ranks, per_rank)
    bound_s = planned.lower_bound_s
    if outcome is None:
        return Judged(planning_s=planning_s, bound_s=bound_s, problems=("the plan deadlocks",))
    problems: list[str] = []
    if planned.recompute:
        problems.append(f"stages {planned.recompute} recompute, which is not simulated")
    if abs(planned.estimate_s / outcome.makespan_s - 1) > _EQUAL:
        problems.append(f"estimated {planned.estimate_s:.6g} s, simulated {outcome.makespan_s:.6g} s")
    if bound_s > outcome.makespan_s * (1 + _EQUAL):
        problems.append(f"bound {bound_s:.6g} s above the plan's own {outcome.makespan_s:.6g} s")
    for rank, peak_bytes in enumerate(outcome.peak_bytes):
        limit = machine.device_of(rank).memory_bytes * options.memory_fraction
        if peak_bytes > limit:
            problems.append(f"rank {rank} needs {peak_bytes} bytes of {limit:.0f}")
    return Judged(
        makespan_s=outcome.makespan_s,
        bound_s=bound_s,
        planning_s=planning_s,
        order=f"{planned.schedule.spec.family.value} x{len(planned.stage_ranks) / ranks:.3g}",
        problems=tuple(problems),
    )
