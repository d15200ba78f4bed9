"""Orders made for a forward and each half of a backward that last one unit of time.

Models: waves with whole backwards; zero bubble with the memory of 1F1B on one stage a rank (ZB-H1) or on a V (ZB-V): an
activation is kept until its weight gradient, and a rank may keep as many as the first rank does under 1F1B. ZB-H1 has a
formula, the others are what a scheduler finds.
Sources: Qi et al., Zero Bubble Pipeline Parallelism (2023); Qi et al., Pipeline Parallelism with Controllable Memory
(2024). Ignores: what jobs really cost; the planner's search orders them anew.
"""

from __future__ import annotations

import numpy as np

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir.actions import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.schedule.listing import JobGraph, Listing, Room, list_schedule
from pfeife_accelerate.schedule.messages import chain_messages
from pfeife_accelerate.schedule.order import Order

__all__ = ["unit_order"]

_PASSES = 3


def unit_order(spec: ScheduleSpec) -> Order:
    """The order of a wave or zero-bubble family."""
    if spec.family is ScheduleFamily.ZB_H1:
        return _zb_h1(spec)
    is_split = spec.family.splits_backward
    ranks, number = spec.stage_ranks, spec.num_microbatches
    graph = JobGraph(ranks, chain_messages(ranks), number, is_split=is_split)
    jobs = graph.num_jobs // graph.num_kinds
    duration_s = [1.0] * jobs + ([1.0] * 2 * jobs if is_split else [2.0] * jobs)
    duration_s += [0.0] * (graph.num_nodes - graph.num_jobs)
    # The first stage of a rank takes the room of all: its later stages would find none behind other micro-batches.
    saved = tuple(float(spec.num_loops) if stage < spec.num_ranks else 0.0 for stage in range(spec.num_stages))
    room = Room(saved_bytes=saved, free_bytes=(_kept(spec),) * spec.num_ranks)
    best: Listing | None = None
    urgency = _depth_first(spec, graph)
    for _ in range(_PASSES):
        found = list_schedule(graph, duration_s, urgency, room=room)
        if found.is_complete and (best is None or found.end_s < best.end_s):
            best = found
        if not found.is_complete:
            break
        ends = [start + lasts for start, lasts in zip(found.start_s, duration_s, strict=True)]
        back = list_schedule(graph, duration_s, [-end for end in ends], reverse=True)
        urgency = [back.end_s - start - lasts for start, lasts in zip(back.start_s, duration_s, strict=True)]
    if best is None:
        raise InternalError(id="PF214", what=f"no order for {spec}")
    like = Order(jobs=(), stage_ranks=ranks, num_microbatches=number, is_split=is_split)
    return best.order(like)


def _zb_h1(spec: ScheduleSpec) -> Order:
    """1F1B on input gradients; rank r runs weight gradients r micro-batches later, and the rest when nothing else is.

    Rank r keeps D-r-1 activations of its warm-up, one that it works on, and r that wait for their weight gradient: D.
    """
    number, ranks = spec.num_microbatches, spec.num_ranks
    jobs = []
    for rank in range(ranks):
        forwards, inputs, weights = (
            [(kind * ranks + rank) * number + microbatch for microbatch in range(number)] for kind in range(3)
        )
        warm_up = ranks - rank - 1
        own = forwards[:warm_up]
        for microbatch in range(number):
            own += forwards[warm_up + microbatch : warm_up + microbatch + 1]
            own.append(inputs[microbatch])
            if microbatch >= rank:
                own.append(weights[microbatch - rank])
        own += weights[max(number - rank, 0) :]
        jobs.append(np.asarray(own, dtype=np.int64))
    return Order(jobs=tuple(jobs), stage_ranks=spec.stage_ranks, num_microbatches=number, is_split=True)


def _depth_first(spec: ScheduleSpec, graph: JobGraph) -> list[float]:
    """Earlier micro-batches before later ones, along their way; weight gradients when nothing else is ready."""
    stages, number = spec.num_stages, spec.num_microbatches
    urgency = [0.0] * graph.num_nodes
    for stage in range(stages):
        for microbatch in range(number):
            first = 3 * stages * microbatch
            along = (first + stage, first + 2 * stages - 1 - stage, 3 * stages * number + microbatch)
            for kind in range(graph.num_kinds):
                urgency[(kind * stages + stage) * number + microbatch] = float(along[kind])
    return urgency


def _kept(spec: ScheduleSpec) -> float:
    """Activations of a stage and micro-batch that a rank may keep: zero bubble as many as 1F1B's first rank."""
    if spec.family.splits_backward:
        return float(spec.num_loops * spec.num_ranks)
    return float(spec.num_loops * max(spec.num_microbatches, spec.num_ranks))
