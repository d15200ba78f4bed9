"""Stands in for the planner where a test is about what is done with a plan: cuts of equal work, 1F1B, no transfers."""

from __future__ import annotations

from itertools import pairwise

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import ActionKind, Interval, StageCost, Timeline
from pfeife_accelerate.planner.bound import BoundKind, LowerBound
from pfeife_accelerate.planner.memory import RankMemory
from pfeife_accelerate.planner.planned import Planned, RunnerUp
from pfeife_accelerate.schedule import one_f_one_b


def simple_plan(graph, num_ranks, num_microbatches, *, limit_bytes=40 * 2**30):
    """A `Planned` for `graph`, one stage a rank."""
    cuts = _cuts(graph, num_ranks)
    stages = tuple(_stage(graph.nodes[first:last]) for first, last in pairwise((0, *cuts, len(graph.nodes))))
    schedule = one_f_one_b(num_ranks=num_ranks, num_microbatches=num_microbatches)
    timeline = timeline_of(schedule, stages)
    memory = tuple(
        RankMemory(
            params_bytes=cost.param_bytes,
            state_bytes=3 * cost.param_bytes,
            activation_bytes=cost.saved_bytes * min(num_microbatches, num_ranks - rank),
            workspace_bytes=cost.workspace_bytes,
            buffer_bytes=0,
            limit_bytes=limit_bytes,
        )
        for rank, cost in enumerate(stages)
    )
    if over := [rank for rank, needs in enumerate(memory) if needs.peak_bytes > limit_bytes]:
        raise PfeifeError(id="PF302", what=f"no plan fits into memory: ranks {over}")
    return Planned(
        graph_fingerprint=graph.fingerprint,
        num_operations=len(graph.nodes),
        cuts=cuts,
        schedule=schedule,
        recompute=(),
        estimate_s=timeline.makespan_s,
        lower_bound=LowerBound(seconds=graph.work_s * num_microbatches / num_ranks, kind=BoundKind.WORK),
        memory=memory,
        stages=stages,
        runners_up=(
            RunnerUp(family="gpipe", estimate_s=2 * timeline.makespan_s, why="holds all micro-batches"),
            RunnerUp(family="zb-v", estimate_s=None, why="a stage would have no operation"),
        ),
        timeline=timeline,
    )


def _cuts(graph, num_stages):
    total, done, cuts = graph.work_s, 0.0, []
    legal = set(graph.legal_cuts)
    for position, node in enumerate(graph.nodes):
        if len(cuts) < num_stages - 1 and position in legal and done >= total * (len(cuts) + 1) / num_stages:
            cuts.append(position)
        done += node.forward_s + node.backward_s
    left = [position for position in sorted(legal - set(cuts)) if not cuts or position > cuts[-1]]
    return (*cuts, *left[: num_stages - 1 - len(cuts)])


def _stage(nodes):
    return StageCost(
        forward_s=sum(node.forward_s for node in nodes),
        backward_s=sum(node.backward_s for node in nodes),
        param_bytes=sum({use.owner: use.num_bytes for node in nodes for use in node.params}.values()),
        saved_bytes=sum(node.saved_bytes for node in nodes),
        workspace_bytes=max((node.workspace_bytes for node in nodes), default=0),
    )


def timeline_of(schedule, stages):
    """Every action as early as its rank and the stages around it allow."""
    ran, free, intervals = {}, [0.0] * schedule.num_ranks, []
    waiting = [list(actions) for actions in schedule.per_rank]
    last = schedule.num_stages - 1
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions:
                action = actions[0]
                is_forward = action.kind is ActionKind.FORWARD
                stage, microbatch = action.stage, action.microbatch
                before = (stage - 1 if is_forward else stage + 1, is_forward, microbatch)
                is_first = stage == (0 if is_forward else last)
                if not is_first and before not in ran:
                    break
                start_s = max(free[rank], 0.0 if is_first else ran[before])
                cost = stages[stage]
                end_s = free[rank] = start_s + (cost.forward_s if is_forward else cost.backward_s)
                ran[stage, is_forward, microbatch] = end_s
                intervals.append(Interval(action=actions.pop(0), rank=rank, start_s=start_s, end_s=end_s))
    return Timeline(intervals=tuple(intervals))
