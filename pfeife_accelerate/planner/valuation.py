"""What slicings are worth under an order: seconds where they fit into memory, far more where they do not.

Models: the event graph of an order, made anew only where a slicing sends something new; what a valuation costs the
search, so that its effort can be limited without a clock and every run gives the same plan.
Ignores: where slicings and orders come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pfeife_accelerate.planner.event_graph import EventGraph
from pfeife_accelerate.planner.memory import MemoryProfile
from pfeife_accelerate.planner.problem import Floats, Ints, Problem
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.schedule.messages import Messages
from pfeife_accelerate.schedule.order import Order

__all__ = ["MISFIT_S", "Effort", "Valuation"]

#: What does not fit is worth this many seconds, and one more for each byte too many; those of the worst rank count
#: twice, so that of two slicings that lack as much the more even one is nearer.
MISFIT_S = 1e15
_MOST_SPARE = 2.0  # messages of an event graph for each that a slicing has; beyond it is made anew
_LOOK = 64  # slicings in one pass
_ROOMY = 0.8  # of what a rank may use
_BATCH_CELLS = 4_000_000  # nodes times slicings in one pass: more would leave the caches without being faster


@dataclass
class Effort:
    """What the search may still spend, in seconds of an ordinary core, by estimate instead of by clock."""

    left_s: float

    def spend(self, seconds: float) -> None:
        """Note that work was done."""
        self.left_s -= seconds

    def part(self, share: float) -> Effort:
        """A share of what is left, set apart; what is left of it can be given back by `spend`."""
        part = Effort(left_s=self.left_s * share)
        self.left_s -= part.left_s
        return part

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0


class Valuation:
    """One order with a choice of stages that recompute; values any slicings.

    One that `is_thorough` minds what each slicing of a batch sends and reads, and is slower.
    """

    def __init__(
        self,
        problem: Problem,
        order: Order,
        effort: Effort,
        recompute: Sequence[int] = (),
        *,
        is_thorough: bool = False,
    ) -> None:
        self.is_thorough = is_thorough
        self.problem, self.order, self.effort = problem, order, effort
        self.recompute = tuple(recompute)
        self._memory: MemoryProfile | None = None
        self._graph: EventGraph | None = None
        self._has_room = False

    @property
    def memory(self) -> MemoryProfile:
        """The order's memory profile."""
        if self._memory is None:
            self._memory = _memory_profile(self.order)
        return self._memory

    def graph(self, messages: Messages) -> EventGraph:
        """An event graph with these messages, and perhaps others: `Slices.durations_for` knows them by its own."""
        if self._graph is None or not _includes(self._graph.messages, messages):
            known = self._graph.messages if self._graph else ()
            wanted = _union(known, messages) if len(known) < _MOST_SPARE * len(messages) else messages
            before = _event_graph.cache_info().misses
            self._graph = _event_graph(self.order, wanted)
            if _event_graph.cache_info().misses > before:
                self.effort.spend(1.0e-6 * self._graph.num_nodes)
        return self._graph

    def slices(self, cuts: Ints) -> Slices:
        """Slicings of this placement: a row of `cuts` for each."""
        return Slices(self.problem, cuts, self.order.stage_ranks, self.recompute)

    def values(self, cuts: Ints) -> Floats:
        """The value of each row of cuts, seconds where it fits."""
        step = max(8, min(64, _BATCH_CELLS // max(self.order.num_jobs, len(self.problem.graph.nodes))))
        found = [self.value(self.slices(cuts[first : first + step])) for first in range(0, len(cuts), step)]
        return np.concatenate(found) if found else np.empty(0)

    def first_look(self, cuts: Ints) -> Floats:
        """Values of rows of cuts that have little in common, without what they send past a stage."""
        plain = Valuation(self.problem, self.order, self.effort, self.recompute)
        return np.concatenate(
            [
                plain.value(Slices(self.problem, cuts[i : i + _LOOK], self.order.stage_ranks, nearest_only=True))
                for i in range(0, len(cuts), _LOOK)
            ]
        )

    def exact(self, cuts: Ints) -> float:
        """The value of one slicing by its own messages alone: a stage waits for nothing that others of a batch send."""
        slices = self.slices(cuts[None])
        known = self.graph(slices.messages).messages
        alone = self if known == slices.messages else Valuation(self.problem, self.order, self.effort, self.recompute)
        return float(alone.value(slices)[0])

    def beyond_s(self, slices: Slices) -> Floats:
        """What the micro-batches add that are left out."""
        if not self.problem.num_beyond:
            return np.zeros(len(slices))
        return self.problem.num_beyond * slices.rank_work_s.max(axis=0)

    def value(self, slices: Slices) -> Floats:
        """The value of each slicing; infinite where the order cannot run.

        One alone is valued by its own messages, or by more of them that take no time. Several are compared by the
        messages that are known already: what only some of them send is left out, since it is seldom waited for.
        """
        is_quick = len(slices) > 1 and not self.is_thorough
        graph = self._graph if self._graph is not None and is_quick else self.graph(slices.messages)
        if not graph.runs:
            return np.full(len(slices), np.inf)
        self.effort.spend(
            1e-3
            + 2.5e-6 * graph.num_levels
            + len(slices) * (7e-9 * graph.num_nodes + 3e-8 * len(self.problem.block_starts))
        )
        holds = slices.holds(graph.messages, graph.conditions) if self.is_thorough else None
        durations = slices.durations_for(graph.messages)
        seconds = graph.makespans(durations, slices.optimizer_s, holds) + self.beyond_s(slices)
        if is_quick and self._has_room:
            return seconds
        peaks = self.memory.peaks(slices)
        lacking = np.maximum(peaks - self.problem.limits[:, None], 0)
        excess = lacking.sum(axis=0) + lacking.max(axis=0)
        if len(slices) == 1:
            # What is near to a slicing that leaves much memory free fits as well; one that is taken is looked at alone.
            self._has_room = bool((peaks[:, 0] < _ROOMY * self.problem.limits).all())
        return np.where(excess > 0, MISFIT_S + excess, seconds)


@lru_cache(maxsize=16)
def _event_graph(order: Order, messages: Messages) -> EventGraph:
    return EventGraph(order, messages)


@lru_cache(maxsize=16)
def _memory_profile(order: Order) -> MemoryProfile:
    return MemoryProfile(order)


def _includes(known: Messages, messages: Messages) -> bool:
    consumers = {message.route: message for message in known}
    for message in messages:
        found = consumers.get(message.route)
        if found is None or not set(message.consumer_stages) <= set(found.consumer_stages):
            return False
        if message.has_grad and not found.has_grad:
            return False
    return True


def _union(known: Messages, messages: Messages) -> Messages:
    """Those of a stage in the order that the second ones have."""
    found = {message.route: message for message in messages}
    for message in known:
        key = message.route
        other = found.get(key)
        if other is not None:
            stages = tuple(sorted({*other.consumer_stages, *message.consumer_stages}))
            message = replace(message, consumer_stages=stages, has_grad=message.has_grad or other.has_grad)
        found[key] = message
    return tuple(sorted(found.values(), key=lambda message: message.producer_stage))
