"""List scheduling: orders that no formula gives, made by letting each rank take the most urgent job that is ready.

Models: jobs and messages as nodes of a graph, each on its rank or directed link, one at a time on each; a limit on the
bytes that activations may take on a rank. Ever the same input gives the same order. Runs forwards and backwards in
time: taking latest starts as urgency, found from the far end, and repeating that, is forward-backward improvement
(Tormos and Lova, 2001), the standard remedy for resource-constrained project scheduling.
Ignores: whether waiting for a more urgent job would pay.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pfeife_accelerate.schedule.messages import Messages
from pfeife_accelerate.schedule.order import Order

__all__ = ["JobGraph", "Listing", "Room", "list_schedule"]


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory for activations: what a forward of each stage takes until its backward, and what each rank has."""

    saved_bytes: tuple[float, ...]
    free_bytes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """When each node started, the jobs of each rank in their order, and whether all could be placed."""

    start_s: list[float]
    end_s: float
    jobs: tuple[list[int], ...]
    is_complete: bool

    def order(self, like: Order) -> Order:
        """The order, with the placement of another."""
        return Order(
            jobs=tuple(np.asarray(jobs, dtype=np.int64) for jobs in self.jobs),
            stage_ranks=like.stage_ranks,
            num_microbatches=like.num_microbatches,
            is_split=like.is_split,
        )


class JobGraph:
    """Who waits for whom. Nodes: the jobs, then a forward message for each route and micro-batch, then those back."""

    def __init__(
        self, stage_ranks: Sequence[int], messages: Messages, num_microbatches: int, *, is_split: bool = False
    ) -> None:
        self.stage_ranks = tuple(stage_ranks)
        self.num_ranks = max(stage_ranks) + 1
        self.num_microbatches = num_microbatches
        self.num_kinds = 3 if is_split else 2
        self.num_jobs = self.num_kinds * len(stage_ranks) * num_microbatches
        self.num_nodes = self.num_jobs + 2 * len(messages) * num_microbatches
        self.resource = [-1] * self.num_nodes
        self.after: list[list[int]] = [[] for _ in range(self.num_nodes)]
        self.before: list[list[int]] = [[] for _ in range(self.num_nodes)]
        self._links: dict[tuple[int, int], int] = {}
        for stage, rank in enumerate(stage_ranks):
            for microbatch in range(num_microbatches):
                jobs = [self._job(kind, stage, microbatch) for kind in range(self.num_kinds)]
                for job in jobs:
                    self.resource[job] = rank
                for job, later in pairwise(jobs):
                    self._edge(job, later)
        for index in range(len(messages)):
            self._add_message(messages, index)
        self.num_resources = self.num_ranks + len(self._links)

    def _job(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * len(self.stage_ranks) + stage) * self.num_microbatches + microbatch

    def _edge(self, before: int, after: int) -> None:
        self.after[before].append(after)
        self.before[after].append(before)

    def _add_message(self, messages: Messages, index: int) -> None:
        message = messages[index]
        producer, source, target = (
            message.producer_stage, self.stage_ranks[message.producer_stage], message.consumer_rank,
        )  # fmt: skip
        for microbatch in range(self.num_microbatches):
            made, given = self._job(0, producer, microbatch), self._job(1, producer, microbatch)
            reads = [self._job(0, stage, microbatch) for stage in message.consumer_stages]
            gives = [self._job(1, stage, microbatch) for stage in message.consumer_stages]
            if source != target:
                sent = self.num_jobs + index * self.num_microbatches + microbatch
                back = sent + len(messages) * self.num_microbatches
                self.resource[sent] = self._link(source, target)
                self._edge(made, sent)
                made = sent
                if message.has_grad:
                    self.resource[back] = self._link(target, source)
                    self._edge(back, given)
                    given = back
            for job in reads:
                self._edge(made, job)
            for job in gives if message.has_grad else ():
                self._edge(job, given)

    def _link(self, source: int, target: int) -> int:
        return self._links.setdefault((source, target), self.num_ranks + len(self._links))

    def tails_s(self, duration_s: Sequence[float]) -> list[float]:
        """For each node, the longest path from its start to the end of the step."""
        tails = [0.0] * self.num_nodes
        left = [len(after) for after in self.after]
        ready = [node for node in range(self.num_nodes) if not left[node]]
        while ready:
            node = ready.pop()
            tails[node] += duration_s[node]
            for earlier in self.before[node]:
                tails[earlier] = max(tails[earlier], tails[node])
                left[earlier] -= 1
                if not left[earlier]:
                    ready.append(earlier)
        return tails


def list_schedule(
    graph: JobGraph,
    duration_s: Sequence[float],
    urgency: Sequence[float],
    *,
    room: Room | None = None,
    reverse: bool = False,
) -> Listing:
    """Each rank takes the ready job of least `urgency`, each link the message that was ready first.

    `duration_s` and `urgency` have an entry for each node. `reverse` runs from the last job to the first: starts then
    count back from the end. With `room` no forward starts that has none; the listing may then be incomplete.
    """
    return _Lister(graph, duration_s, urgency, room, reverse).run()


class _Lister:
    def __init__(
        self, graph: JobGraph, duration_s: Sequence[float], urgency: Sequence[float], room: Room | None, reverse: bool
    ) -> None:
        self.graph, self.duration_s, self.urgency = graph, duration_s, urgency
        self.after, before = (graph.before, graph.after) if reverse else (graph.after, graph.before)
        self.missing = [len(nodes) for nodes in before]
        self.num_forwards = len(graph.stage_ranks) * graph.num_microbatches
        self.first_last_kind = graph.num_jobs - self.num_forwards
        self.saved = room.saved_bytes if room else None
        self.free = list(room.free_bytes) if room else []
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(graph.num_resources)]
        self.is_busy = [False] * graph.num_resources
        self.start_s = [0.0] * graph.num_nodes
        self.jobs: tuple[list[int], ...] = tuple([] for _ in range(graph.num_ranks))
        self.events: list[tuple[float, int]] = []

    def run(self) -> Listing:
        """Event by event; written out, because the search spends much of its time here."""
        resource, after, missing, num_ranks = self.graph.resource, self.after, self.missing, self.graph.num_ranks
        ready, is_busy, events, urgency = self.ready, self.is_busy, self.events, self.urgency
        push, pop = heapq.heappush, heapq.heappop
        nodes = [node for node in range(self.graph.num_nodes) if resource[node] >= 0]
        touched = set()
        for node in nodes:
            if not missing[node]:
                index = resource[node]
                push(ready[index], (urgency[node] if index < num_ranks else 0.0, node))
                touched.add(index)
        left, now_s = len(nodes), 0.0
        while True:
            for index in sorted(touched):
                if ready[index] and not is_busy[index]:
                    self._start(index, now_s)
            if not events:
                return Listing(start_s=self.start_s, end_s=now_s, jobs=self.jobs, is_complete=not left)
            now_s = events[0][0]
            touched = set()
            while events and events[0][0] == now_s:
                node = pop(events)[1]
                left -= 1
                index = resource[node]
                is_busy[index] = False
                touched.add(index)
                if self.saved is not None and index < num_ranks:
                    self._free(node)
                for later in after[node]:
                    missing[later] -= 1
                    if not missing[later]:
                        index = resource[later]
                        push(ready[index], (urgency[later] if index < num_ranks else now_s, later))
                        touched.add(index)

    def _start(self, index: int, now_s: float) -> None:
        if self.saved is None or index >= self.graph.num_ranks:
            node = heapq.heappop(self.ready[index])[1]
        else:
            found = self._next(index)
            if found is None:
                return
            node = found
        self.is_busy[index] = True
        self.start_s[node] = now_s
        if index < self.graph.num_ranks:
            self.jobs[index].append(node)
        heapq.heappush(self.events, (now_s + self.duration_s[node], node))

    def _next(self, index: int) -> int | None:
        """The most urgent ready job of a rank that there is room for."""
        queue, saved = self.ready[index], self.saved or ()
        passed = []
        found = None
        while queue:
            entry = heapq.heappop(queue)
            needs = saved[entry[1] // self.graph.num_microbatches] if entry[1] < self.num_forwards else 0.0
            if needs <= self.free[index]:
                self.free[index] -= needs
                found = entry[1]
                break
            passed.append(entry)
        for entry in passed:
            heapq.heappush(queue, entry)
        return found

    def _free(self, node: int) -> None:
        if self.saved is not None and node >= self.first_last_kind:
            stage = (node - self.first_last_kind) // self.graph.num_microbatches
            self.free[self.graph.resource[node]] += self.saved[stage]
