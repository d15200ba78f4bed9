"""Better orders for a slicing: forward-backward improvement by list scheduling, under the memory limit.

Models: the slicing's own times and messages. Ignores: other slicings; orders that leave a rank idle on purpose.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pfeife_accelerate.planner.problem import Ints
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.planner.valuation import Valuation
from pfeife_accelerate.schedule.listing import JobGraph, Room, list_schedule
from pfeife_accelerate.schedule.messages import Messages
from pfeife_accelerate.schedule.order import Order

__all__ = ["reorder"]

_NODE_S = 2.8e-6  # what one node costs a pass


def reorder(valuation: Valuation, cuts: Ints, *, passes: int = 3, is_near: bool = False) -> tuple[Order, float]:
    """The best order found for the cuts, and its value; the valuation's own where none is better.

    The first pass forgets the valuation's order, unless that `is_near`: made for cuts like these.
    """
    slices = valuation.slices(cuts[None])
    valuation = Valuation(valuation.problem, valuation.order, valuation.effort, valuation.recompute)
    best, best_value = valuation.order, float(valuation.value(slices)[0])
    graph = valuation.graph(slices.messages)
    if not graph.runs:
        return best, best_value
    order, effort = valuation.order, valuation.effort
    jobs = _job_graph(order.stage_ranks, slices.messages, order.num_microbatches, order.is_split)
    duration_s = np.repeat(slices.durations[:, 0], order.num_microbatches).tolist()
    room = _room(slices, order)
    effort.spend(_NODE_S * jobs.num_nodes)
    beyond_s = float(valuation.beyond_s(slices)[0])
    end_s = graph.end_of_nodes(slices.durations).tolist()
    for number in range(int(is_near), passes):
        if effort.is_spent:
            break
        effort.spend(2 * _NODE_S * jobs.num_nodes)
        if number == 0:
            urgency = [-tail_s for tail_s in jobs.tails_s(duration_s)]
        else:
            back = list_schedule(jobs, duration_s, [-end for end in end_s], reverse=True)
            urgency = [back.end_s - start - lasts for start, lasts in zip(back.start_s, duration_s, strict=True)]
        listing = list_schedule(jobs, duration_s, urgency, room=room)
        if not listing.is_complete:
            continue
        # The listing's own end is near to the truth: messages that are ready at once may go in another order.
        if listing.end_s + beyond_s < best_value:
            found = listing.order(order)
            value = float(Valuation(valuation.problem, found, effort, valuation.recompute).value(slices)[0])
            if value < best_value:
                best, best_value = found, value
        if number > 0:
            end_s = [start + lasts for start, lasts in zip(listing.start_s, duration_s, strict=True)]
    return best, best_value


@lru_cache(maxsize=4)
def _job_graph(stage_ranks: tuple[int, ...], messages: Messages, num_microbatches: int, is_split: bool) -> JobGraph:
    return JobGraph(stage_ranks, messages, num_microbatches, is_split=is_split)


def _room(slices: Slices, order: Order) -> Room:
    """What is left for activations beside parameters and the largest workspace."""
    workspace = np.maximum(slices.forward_peak_bytes - slices.saved_bytes, slices.backward_workspace_bytes)[:, 0]
    largest = np.zeros(order.num_ranks)
    np.maximum.at(largest, slices.stage_ranks, workspace)
    free = slices.problem.limits - slices.state_bytes[:, 0] - slices.buffer_bytes[:, 0] - largest
    return Room(saved_bytes=tuple(slices.saved_bytes[:, 0].tolist()), free_bytes=tuple(free.tolist()))
