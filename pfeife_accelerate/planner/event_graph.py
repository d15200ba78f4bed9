"""When everything happens, for one order and many slicings at once.

Models: an order fixes what each job waits for: the job before it on its rank, the messages it reads; and a message
waits for the job that makes it and the message before it on its directed link. The times are longest paths in this
graph, so all slicings that share an order are one pass over arrays, level by level. What one of them does not send or
read it need not wait for (`holds`).
Ignores: memory, and how the order was found; where slicings differ in which stage of a rank adds to a gradient last,
that has the place on its link that it has for all of them together.

Legend: jobs are numbered as in `schedule.order`; nodes are the jobs, then each message for each micro-batch, then its
way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from pfeife_accelerate.planner.problem import Floats, Ints
from pfeife_accelerate.schedule.messages import Message
from pfeife_accelerate.schedule.order import Order

__all__ = ["EventGraph"]


class EventGraph:
    """The graph of an order, its nodes sorted by level. Rows of costs: kinds by stage, messages, their ways back."""

    def __init__(self, order: Order, messages: Sequence[Message]) -> None:
        """Build it; `runs` tells whether the order can run at all."""
        self.order = order
        self.messages = tuple(messages)
        self._edges: list[tuple[Ints, Ints, Ints]] = []
        #: (message, consumer or -1 for the message as a whole, whether its gradient): what some edges depend on
        self.conditions: list[tuple[int, int, bool]] = []
        self.num_kinds, self.num_jobs = order.num_kinds, order.num_jobs
        self.num_nodes = self.num_jobs + 2 * len(self.messages) * order.num_microbatches
        self._position = np.full(self.num_jobs, -1, dtype=np.int64)
        for jobs in order.jobs:
            self._position[jobs] = np.arange(len(jobs))
            self._edge(jobs[:-1], jobs[1:])
        self._transfers()
        # A rank's own dependencies follow from its order, once that is known to respect them.
        num_needed = len(self._edges)
        self._local_edges()
        self.runs = self._sort(num_needed)

    def _job(self, kind: int, stage: int) -> Ints:
        """The jobs of a kind and stage, one for each micro-batch."""
        number = self.order.num_microbatches
        return np.arange(number) + (kind * self.order.num_stages + stage) * number

    def _edge(self, before: Ints, after: Ints, conditions: Ints | None = None) -> None:
        """Edges, and for each row of them the number of its condition, if it has one."""
        numbers = np.zeros(1, dtype=np.int64) if conditions is None else conditions
        depends_on = np.broadcast_to(numbers[:, None], (len(numbers), before.size // len(numbers)))
        self._edges.append((before.ravel(), after.ravel(), depends_on.ravel()))

    def _conditions(self, messages: Ints, consumers: Ints, *, is_gradient: bool) -> Ints:
        """Numbers of conditions, from 1 on: 0 is that of edges without."""
        first = len(self.conditions) + 1
        self.conditions += [(m, c, is_gradient) for m, c in zip(messages.tolist(), consumers.tolist(), strict=True)]
        return np.arange(first, len(self.conditions) + 1)

    def _local_edges(self) -> None:
        """What a rank's own order must respect; it does in an order that runs, and is a cycle in one that does not."""
        for stage in range(self.order.num_stages):
            for kind in range(1, self.num_kinds):
                self._edge(self._job(kind - 1, stage), self._job(kind, stage))
        for message in self.messages:
            if self.order.stage_ranks[message.producer_stage] == message.consumer_rank:
                for consumer in message.consumer_stages:
                    self._edge(self._job(0, message.producer_stage), self._job(0, consumer))
                    if message.has_grad:
                        self._edge(self._job(1, consumer), self._job(1, message.producer_stage))

    def _transfers(self) -> None:
        """Messages as nodes: each behind its sender, before its readers, in line on its directed link."""
        ranks, number, count = self.order.stage_ranks, self.order.num_microbatches, len(self.messages)
        remote = [i for i, m in enumerate(self.messages) if ranks[m.producer_stage] != m.consumer_rank]
        if not remote:
            return
        index = np.asarray(remote)
        producer = np.asarray([self.messages[i].producer_stage for i in remote])
        source = np.asarray([ranks[stage] for stage in producer])
        target = np.asarray([self.messages[i].consumer_rank for i in remote])
        has_grad = np.asarray([self.messages[i].has_grad for i in remote])
        sides = [(at, stage) for at, i in enumerate(remote) for stage in self.messages[i].consumer_stages]
        message, consumer = np.asarray(sides).T
        microbatch = np.arange(number)
        sent, back = self.num_jobs + index * number, self.num_jobs + (index + count) * number

        def each(first: Ints) -> Ints:
            return first[:, None] + microbatch

        stages = self.order.num_stages
        whole = np.full(len(index), -1)
        self._edge(each(producer * number), each(sent), self._conditions(index, whole, is_gradient=False))
        reads = self._conditions(index[message], consumer, is_gradient=False)
        self._edge(each(sent[message]), each(consumer * number), reads)
        # A gradient leaves behind the last backward, in its rank's order, of those that add to it.
        backward = each((stages + consumer) * number)
        last = np.maximum.reduceat(self._position[backward], np.searchsorted(message, np.arange(len(remote))), axis=0)
        if has_grad.any():
            gives = has_grad[message]
            adds = self._conditions(index[message][gives], consumer[gives], is_gradient=True)
            self._edge(backward[gives], each(back[message][gives]), adds)
            waits = self._conditions(index[has_grad], whole[has_grad], is_gradient=True)
            self._edge(each(back[has_grad]), each((stages + producer[has_grad]) * number), waits)
        link = np.concatenate(
            (source * len(self.order.jobs) + target, (target * len(self.order.jobs) + source)[has_grad])
        )
        place = np.concatenate((self._position[each(producer * number)], last[has_grad]))
        tie = np.concatenate((index, index[has_grad]))
        node = np.concatenate((each(sent), each(back[has_grad])))
        links, ties = np.broadcast_to(link[:, None], node.shape), np.broadcast_to(tie[:, None], node.shape)
        line = np.lexsort((ties.ravel(), place.ravel(), links.ravel()))
        node, links = node.ravel()[line], links.ravel()[line]
        same = links[1:] == links[:-1]
        self._edge(node[:-1][same], node[1:][same])

    def _sort(self, num_needed: int) -> bool:
        """Give each node its level, wave by wave; False where a cycle leaves some without."""
        depends_on = np.concatenate([edge[2] for edge in self._edges[:num_needed]])
        before = np.concatenate([edge[0] for edge in self._edges])
        after = np.concatenate([edge[1] for edge in self._edges])
        self._edges = []
        number_missing = np.bincount(after, minlength=self.num_nodes)
        present = np.zeros(self.num_nodes, dtype=np.bool_)
        present[np.concatenate(self.order.jobs)] = True
        present[after] = True
        # Waves are narrow: plain lists are faster than arrays.
        targets = after[np.argsort(before, kind="stable")].tolist()
        start = np.concatenate(([0], np.cumsum(np.bincount(before, minlength=self.num_nodes)))).tolist()
        wave = np.flatnonzero(present & (number_missing == 0)).tolist()
        missing = number_missing.tolist()
        waves = []
        while wave:
            waves.append(wave)
            reached: list[int] = []
            for node in wave:
                for later in targets[start[node] : start[node + 1]]:
                    missing[later] -= 1
                    if not missing[later]:
                        reached.append(later)
            wave = reached
        if sum(map(len, waves)) < present.sum():
            return False
        self._number(waves, before[: len(depends_on)], after[: len(depends_on)], depends_on)
        return True

    def _number(self, waves: list[list[int]], before: Ints, after: Ints, depends_on: Ints) -> None:
        """Nodes by level from 1 on; 0 is the start of time, before those that wait for nothing."""
        sequence = np.asarray(list(chain.from_iterable(waves)), dtype=np.int64)
        number = np.zeros(self.num_nodes, dtype=np.int64)
        number[sequence] = np.arange(1, len(sequence) + 1)
        before = np.concatenate((number[before], np.zeros(len(waves[0]), dtype=np.int64)))
        after = np.concatenate((number[after], number[waves[0]]))
        line = np.argsort(after, kind="stable")
        self._before = before[line]
        self._depends_on = np.concatenate((depends_on, np.zeros(len(waves[0]), dtype=np.int64)))[line]
        self._first = np.searchsorted(after[line], np.arange(1, len(sequence) + 2))
        self._row = np.concatenate(([0], sequence // self.order.num_microbatches))
        self._sequence = sequence
        self._last_jobs = np.asarray([number[jobs[-1]] for jobs in self.order.jobs])
        self._plan_levels(np.asarray([0, *map(len, waves)]))

    def _plan_levels(self, sizes: Ints) -> None:
        """For each level, its nodes and a table of what they wait for: as many rows as its busiest node needs.

        Nodes that wait for less have their first thing in the other rows.
        """
        bounds = np.cumsum(sizes)
        counts = np.diff(self._first)
        rows = np.maximum.reduceat(counts, bounds[:-1])
        turn = np.arange(int(counts.max()))[:, None]
        edge = self._first[:-1] + np.where(turn < counts, turn, 0)
        before, depends_on = self._before[edge], self._depends_on[edge]
        #: (first node, node after the last, their rows of costs, what they wait for, on which conditions)
        self._levels = [
            (
                first + 1,
                last + 1,
                self._row[first + 1 : last + 1],
                before[:most, first:last],
                depends_on[:most, first:last],
            )
            for (first, last), most in zip(pairwise(bounds.tolist()), rows.tolist(), strict=True)
        ]

    @property
    def num_levels(self) -> int:
        """Nodes on the path with the most of them."""
        return len(self._levels) if self.runs else 0

    def end_of_nodes(self, durations: Floats) -> Floats:
        """End of every node, numbered as in `schedule.listing`, for the first slicing."""
        ends = np.zeros(self.num_nodes)
        ends[self._sequence] = self.times(durations[:, :1])[1:, 0]
        return ends

    def times(self, durations: Floats, holds: Floats | None = None) -> Floats:
        """End of every node for every slicing, row 0 the start; `durations` has a column for each slicing.

        `holds` is 1 where a condition (the row of its number) holds for a slicing, else 0; without it all hold.
        """
        ends = np.zeros((len(self._row), durations.shape[1]))
        for first, last, rows, before, depends_on in self._levels:
            ready = ends.take(before, axis=0)
            if holds is not None:
                ready *= holds.take(depends_on, axis=0)
            np.add(np.maximum.reduce(ready), durations.take(rows, axis=0), out=ends[first:last])
        return ends

    def makespans(self, durations: Floats, optimizer_s: Floats, holds: Floats | None = None) -> Floats:
        """Seconds of the step for every slicing; `optimizer_s` has a row for each rank."""
        return (self.times(durations, holds)[self._last_jobs] + optimizer_s).max(axis=0)

    def critical_rows(self, durations: Floats, optimizer_s: Floats) -> Floats:
        """How often each row of costs is on a longest path of the first slicing."""
        ends = self.times(durations[:, :1])[:, 0]
        node = int(self._last_jobs[(ends[self._last_jobs] + optimizer_s[:, 0]).argmax()])
        counts = np.zeros(len(durations))
        while node:
            counts[self._row[node]] += 1
            waited = self._before[self._first[node - 1] : self._first[node]]
            node = int(waited[ends[waited].argmax()])
        return counts
