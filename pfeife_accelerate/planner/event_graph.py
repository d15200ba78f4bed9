"""When everything happens, for one order and many slicings at once.

Models: an order fixes what each job waits for: the job before it on its rank, the messages it reads; and a message
waits for the job that makes it and the message before it on its directed link. The times are longest paths in this
graph, so all slicings that share an order are one pass over arrays, level by level. What one of them does not send or
read, it does not wait for.
Ignores: memory, and how the order was found; where slicings differ in which stage reads a message last on a rank, its
gradient has the place on its link that it has for all of them together.

Legend: jobs are numbered as in `schedule.order`; nodes are the jobs, then each message for each micro-batch, then its
way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
        self._edges: list[tuple[Ints, Ints, int]] = []
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

    def _edge(self, before: Ints, after: Ints, condition: int = 0) -> None:
        self._edges.append((before, after, condition))

    def _condition(self, message: int, consumer: int, is_gradient: bool) -> int:
        """Its number; 0 is that of edges without."""
        self.conditions.append((message, consumer, is_gradient))
        return len(self.conditions)

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
        ranks, number = self.order.stage_ranks, self.order.num_microbatches
        nodes, links, senders, ties = [], [], [], []
        for index, message in enumerate(self.messages):
            source = ranks[message.producer_stage]
            if source == message.consumer_rank:
                continue
            for is_gradient in (False, True) if message.has_grad else (False,):
                node = self.num_jobs + (index + is_gradient * len(self.messages)) * number + np.arange(number)
                if is_gradient:
                    candidates = np.stack([self._job(1, consumer) for consumer in message.consumer_stages])
                    last = self._position[candidates].argmax(axis=0)
                    sender = candidates[last, np.arange(number)]
                    for consumer in message.consumer_stages:
                        self._edge(self._job(1, consumer), node, self._condition(index, consumer, True))
                    self._edge(node, self._job(1, message.producer_stage), self._condition(index, -1, True))
                else:
                    sender = self._job(0, message.producer_stage)
                    self._edge(sender, node, self._condition(index, -1, False))
                    for consumer in message.consumer_stages:
                        self._edge(node, self._job(0, consumer), self._condition(index, consumer, False))
                pair = (message.consumer_rank, source) if is_gradient else (source, message.consumer_rank)
                nodes.append(node)
                senders.append(self._position[sender])
                links.append(np.full(number, pair[0] * len(self.order.jobs) + pair[1]))
                ties.append(np.full(number, -index if is_gradient else index))
        if nodes:
            node, link = np.concatenate(nodes), np.concatenate(links)
            line = np.lexsort((np.concatenate(ties), np.concatenate(senders), link))
            same = link[line][1:] == link[line][:-1]
            self._edge(node[line][:-1][same], node[line][1:][same])

    def _sort(self, num_needed: int) -> bool:
        """Give each node its level, wave by wave; False where a cycle leaves some without."""
        edges, self._edges = self._edges, []
        before = np.concatenate([edge[0] for edge in edges])
        after = np.concatenate([edge[1] for edge in edges])
        lengths = [len(edge[0]) for edge in edges[:num_needed]]
        condition = np.repeat([edge[2] for edge in edges[:num_needed]], lengths)
        missing = np.bincount(after, minlength=self.num_nodes)
        by_source = np.argsort(before, kind="stable")
        targets = after[by_source]
        start = np.concatenate(([0], np.cumsum(np.bincount(before, minlength=self.num_nodes))))
        present = np.zeros(self.num_nodes, dtype=np.bool_)
        present[np.concatenate(self.order.jobs)] = True
        present[after] = True
        mark = np.zeros(self.num_nodes, dtype=np.int64)
        wave = np.flatnonzero(present & (missing == 0))
        waves = []
        while len(wave):
            waves.append(wave)
            counts = start[wave + 1] - start[wave]
            if not counts.any():
                break
            offsets = np.repeat(start[wave] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
            reached = targets[offsets + np.arange(counts.sum())]
            np.subtract.at(missing, reached, 1)
            done = reached[missing[reached] == 0]
            # A node may have been reached by several of the wave: the last of them stands for all.
            mark[done] = np.arange(len(done))
            wave = done[mark[done] == np.arange(len(done))]
        if sum(map(len, waves)) < present.sum():
            return False
        self._number(waves, before[: len(condition)], after[: len(condition)], condition)
        return True

    def _number(self, waves: list[Ints], before: Ints, after: Ints, condition: Ints) -> None:
        """Nodes by level from 1 on; 0 is the start of time, before those that wait for nothing."""
        sequence = np.concatenate(waves)
        number = np.zeros(self.num_nodes, dtype=np.int64)
        number[sequence] = np.arange(1, len(sequence) + 1)
        before = np.concatenate((number[before], np.zeros(len(waves[0]), dtype=np.int64)))
        after = np.concatenate((number[after], number[waves[0]]))
        line = np.argsort(after, kind="stable")
        self._before = before[line]
        self._depends_on = np.concatenate((condition, np.zeros(len(waves[0]), dtype=np.int64)))[line]
        self._first = np.searchsorted(after[line], np.arange(1, len(sequence) + 2))
        self._row = np.concatenate(([0], sequence // self.order.num_microbatches))
        self._sequence = sequence
        self._last_jobs = np.asarray([number[jobs[-1]] for jobs in self.order.jobs])
        bounds = np.cumsum([0, *map(len, waves)]).tolist()
        self._levels = [self._level(first, last) for first, last in pairwise(bounds)]

    def _level(self, first: int, last: int) -> tuple[int, int, list[tuple[Ints | None, Ints, Ints]]]:
        """Range of nodes, and what they wait for: all for the first, then those that wait for more for the next."""
        start, count = self._first[first:last], np.diff(self._first[first : last + 1])
        waits: list[tuple[Ints | None, Ints, Ints]] = [(None, self._before[start], self._depends_on[start])]
        for number in range(1, int(count.max())):
            some = np.flatnonzero(count > number)
            edge = start[some] + number
            waits.append((None if len(some) == last - first else some, self._before[edge], self._depends_on[edge]))
        return first + 1, last + 1, waits

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

        `holds` is 1 where a condition (its number is the row) holds for a slicing, else 0; without it, all hold.
        """
        ends = np.zeros((len(self._row), durations.shape[1]))
        for first, last, waits in self._levels:
            ready = ends[waits[0][1]]
            if holds is not None:
                ready *= holds[waits[0][2]]
            for some, before, condition in waits[1:]:
                other = ends[before]
                if holds is not None:
                    other *= holds[condition]
                if some is None:
                    np.maximum(ready, other, out=ready)
                else:
                    ready[some] = np.maximum(ready[some], other)
            np.add(ready, durations[self._row[first:last]], out=ends[first:last])
        return ends

    def makespans(self, durations: Floats, optimizer_s: Floats, holds: Floats | None = None) -> Floats:
        """Seconds of the step for every slicing; `optimizer_s` has a row for each rank."""
        return (self.times(durations, holds)[self._last_jobs] + optimizer_s).max(axis=0)

    def critical_rows(self, durations: Floats, optimizer_s: Floats, holds: Floats | None = None) -> Floats:
        """How often each row of costs is on a longest path of the first slicing."""
        holds = None if holds is None else holds[:, :1]
        ends = self.times(durations[:, :1], holds)[:, 0]
        node = int(self._last_jobs[(ends[self._last_jobs] + optimizer_s[:, 0]).argmax()])
        counts = np.zeros(len(durations))
        while node:
            counts[self._row[node]] += 1
            edges = slice(self._first[node - 1], self._first[node])
            waited = self._before[edges]
            until = ends[waited] if holds is None else ends[waited] * holds[self._depends_on[edges], 0]
            node = int(waited[until.argmax()])
        return counts
