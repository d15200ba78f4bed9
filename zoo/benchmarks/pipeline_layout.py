"""A graph cut into stages on ranks: what each stage costs, what it waits for, which messages it causes.

Models: prefix sums of time and memory over the operations; each parameter storage once a rank; all tensors that a stage
makes for a rank and that the same stage reads first there as one message, straight to that rank.
Ignores: the order of anything; `event_simulator` runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pfeife_accelerate.ir import CostGraph

__all__ = ["BACKWARD", "FORWARD", "WEIGHT", "Layout", "Message"]

FORWARD, BACKWARD, WEIGHT = range(3)  # what happens to a stage with a micro-batch; an input gradient is a BACKWARD


@dataclass(frozen=True, kw_only=True)
class Message:
    """What stage `producer` sends to `receiver`, where stage `first` is the first to read it."""

    producer: int
    sender: int
    receiver: int
    first: int
    num_bytes: int
    gradient_bytes: int
    contributors: tuple[int, ...]  #: stages on the receiver whose backward adds to the gradient


@dataclass(frozen=True)
class _Part:
    """One tensor of a message."""

    num_bytes: int
    gradient_bytes: int
    stages: frozenset[int]


class Layout:
    """Stages on ranks. Things that happen are numbers: `done(phase, stage)`, `there(message)`, `back(message)`."""

    def __init__(self, graph: CostGraph, cuts: Sequence[int], stage_ranks: Sequence[int], num_ranks: int) -> None:
        bounds = [0, *cuts, len(graph.nodes)]
        if len(stage_ranks) != len(bounds) - 1 or any(first >= last for first, last in pairwise(bounds)):
            raise ValueError(f"cuts {cuts} do not make {len(stage_ranks)} stages of {len(graph.nodes)} operations")
        self.stage_ranks, self.num_ranks, self.num_stages = tuple(stage_ranks), num_ranks, len(stage_ranks)
        self.seconds: list[dict[str, float]] = []  #: of each stage, by the letter of the action
        self.saved_bytes: list[int] = []
        self.high_bytes: list[int] = []  #: saved so far and workspace, at the worst operation
        for first, last in pairwise(bounds):
            self._measure(graph, first, last)
        self._stage_of = [stage for stage, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last)]
        self.static_bytes, self.optimizer_s = [0] * num_ranks, [0.0] * num_ranks
        self._own(graph)
        self.messages: list[Message] = []
        self._before: list[set[int]] = [set() for _ in range(3 * self.num_stages)]
        self._connect(graph)
        #: how much each `done(phase, stage)` waits for, and who waits for each thing that happens
        self.num_needed = [len(needed) for needed in self._before]
        self.waiting: list[list[int]] = [[] for _ in range(3 * self.num_stages + 2 * len(self.messages))]
        for job, needed in enumerate(self._before):
            for event in needed:
                self.waiting[event].append(job)

    def done(self, phase: int, stage: int) -> int:
        """A stage has run a phase."""
        return phase * self.num_stages + stage

    def there(self, message: int) -> int:
        """A message has arrived."""
        return 3 * self.num_stages + 2 * message

    def back(self, message: int) -> int:
        """The gradient of a message has arrived."""
        return 3 * self.num_stages + 2 * message + 1

    def _measure(self, graph: CostGraph, first: int, last: int) -> None:
        nodes = graph.nodes[first:last]
        forward = sum(node.forward_s for node in nodes)
        halves = sum(node.backward_input_s for node in nodes), sum(node.backward_weight_s for node in nodes)
        self.seconds.append({"F": forward, "B": sum(halves), "I": halves[0], "W": halves[1]})
        saved = high = 0
        for node in nodes:
            saved += node.saved_bytes
            high = max(high, saved + node.workspace_bytes)
        self.saved_bytes.append(saved)
        self.high_bytes.append(high)

    def _own(self, graph: CostGraph) -> None:
        seen: set[tuple[int, int]] = set()
        for node, stage in zip(graph.nodes, self._stage_of, strict=True):
            rank = self.stage_ranks[stage]
            for use in node.params:
                if (rank, use.owner) not in seen:
                    seen.add((rank, use.owner))
                    self.static_bytes[rank] += use.state_bytes
                    self.optimizer_s[rank] += use.optimizer_s

    def _connect(self, graph: CostGraph) -> None:
        joined: dict[tuple[int, int, int], list[_Part]] = defaultdict(list)
        for value in graph.values:
            producer = self._stage_of[value.producer]
            readers: dict[int, set[int]] = defaultdict(set)
            for stage in {self._stage_of[node] for node in value.readers} - {producer}:
                readers[self.stage_ranks[stage]].add(stage)
            for stage in readers.pop(self.stage_ranks[producer], ()):
                self._before[self.done(FORWARD, stage)].add(self.done(FORWARD, producer))
                if value.gradient_bytes:
                    self._before[self.done(BACKWARD, producer)].add(self.done(BACKWARD, stage))
            for rank, stages in readers.items():
                joined[producer, rank, min(stages)].append(
                    _Part(value.num_bytes, value.gradient_bytes, frozenset(stages))
                )
        for (producer, rank, first), parts in joined.items():
            self._send(producer, rank, first, parts)
        for stage in range(self.num_stages):
            self._before[self.done(BACKWARD, stage)].add(self.done(FORWARD, stage))
            self._before[self.done(WEIGHT, stage)].add(self.done(BACKWARD, stage))

    def _send(self, producer: int, rank: int, first: int, parts: list[_Part]) -> None:
        number = len(self.messages)
        contributors = _union(part.stages for part in parts if part.gradient_bytes)
        for stage in _union(part.stages for part in parts):
            self._before[self.done(FORWARD, stage)].add(self.there(number))
        if contributors:
            self._before[self.done(BACKWARD, producer)].add(self.back(number))
        self.messages.append(
            Message(
                producer=producer,
                sender=self.stage_ranks[producer],
                receiver=rank,
                first=first,
                num_bytes=sum(part.num_bytes for part in parts),
                gradient_bytes=sum(part.gradient_bytes for part in parts),
                contributors=tuple(sorted(contributors)),
            )
        )


def _union(sets: Iterable[frozenset[int]]) -> set[int]:
    return set().union(*sets)
