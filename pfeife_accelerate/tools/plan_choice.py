"""How many micro-batches, and how many replicas of how long a pipeline, where the person leaves that open.

Models: costs at each size of micro-batch, since small ones compute less efficiently; the ring all-reduce of gradients
between replicas, after the step. Ignores: an all-reduce that overlaps the step, so that replicas are never flattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, Machine
from pfeife_accelerate.planner.planned import Planned

__all__ = ["Attempt", "Choice", "Search", "Shape", "all_reduce_s", "choose", "microbatch_numbers", "shapes"]

#: Micro-batches to try, for each rank of a pipeline.
_PER_RANK: Final = (0.5, 1, 1.5, 2, 3, 4, 6, 8)
_NEAR: Final = 1.25  # so much more or fewer, where that divides the batch
#: So many shapes are planned in earnest at most, if their quick plans take no longer than so many times the best one.
_FINALISTS: Final = 3
_CLOSE: Final = 1.03

#: Plans a graph on so many ranks with so many micro-batches; the last argument is the effort.
Search = Callable[[CostGraph, int, int, str], Planned]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One way to use the ranks: `num_replicas` pipelines, the batch of each in `num_microbatches` pieces."""

    num_replicas: int
    num_microbatches: int
    rows: int  #: of the largest micro-batch

    def __str__(self) -> str:
        """As people say it."""
        pieces = f"{self.num_microbatches} micro-batch{'' if self.num_microbatches == 1 else 'es'}"
        text = f"{pieces} of {self.rows} row{'' if self.rows == 1 else 's'}"
        return text if self.num_replicas == 1 else f"{self.num_replicas} replicas, {text}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What planning one shape gave: the seconds of a step, or why there is no plan."""

    shape: Shape
    step_s: float | None = None
    problem: PfeifeError | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A shape with its plan; for the best one also what the quick plans of all gave, the best first."""

    shape: Shape
    planned: Planned
    graph: CostGraph
    all_reduce_s: float
    attempts: tuple[Attempt, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step, the sum of the replicas' gradients included."""
        return self.planned.estimate_s + self.all_reduce_s


def microbatch_numbers(batch: int, num_ranks: int, *, least_rows: int = 1) -> tuple[int, ...]:
    """Numbers of micro-batches worth trying.

    Where a number near by divides the batch, that one; of several that give equally large micro-batches the least.
    """
    most = max(1, batch // least_rows)
    wanted = {min(most, max(1, round(num_ranks * factor))) for factor in _PER_RANK}
    rows = {-(-batch // _dividing(batch, number, most)) for number in wanted}
    return tuple(sorted(-(-batch // size) for size in rows))


def _dividing(batch: int, number: int, most: int) -> int:
    near = [n for n in range(1, most + 1) if batch % n == 0 and number / _NEAR <= n <= number * _NEAR]
    return min(near, key=lambda n: (max(n / number, number / n), n), default=number)


def shapes(
    *, batch: int, num_ranks: int, num_microbatches: int | None, num_replicas: int | None, least_rows: int = 1
) -> tuple[Shape, ...]:
    """Every shape to try; None stands for a number that is left open."""
    replicas = [num_replicas] if num_replicas is not None else range(1, num_ranks + 1)
    found = []
    for replica_count in replicas:
        if num_ranks % replica_count or batch % replica_count:
            continue
        share = batch // replica_count
        numbers: Sequence[int] = (
            microbatch_numbers(share, num_ranks // replica_count, least_rows=least_rows)
            if num_microbatches is None
            else (num_microbatches,)
        )
        found += [
            Shape(num_replicas=replica_count, num_microbatches=number, rows=-(-share // number))
            for number in numbers
            if number <= share
        ]
    return tuple(found)


def choose(
    candidates: Sequence[Shape],
    graph_of: Callable[[int], CostGraph],
    search: Search,
    machine: Machine,
    num_ranks: int,
    *,
    effort: str,
    tell: Callable[[Shape], None],
) -> Choice:
    """The shape with the shortest step. Several are compared by quick plans; the nearest are planned in earnest.

    Raises: PfeifeError, that of the shape with the most micro-batches on the longest pipeline, where none can be
    planned.
    """

    def choice_of(shape: Shape, effort: str) -> Choice:
        tell(shape)
        graph = graph_of(shape.rows)
        planned = search(graph, num_ranks // shape.num_replicas, shape.num_microbatches, effort)
        return Choice(
            shape=shape, planned=planned, graph=graph, all_reduce_s=all_reduce_s(planned, graph, machine, shape)
        )

    if len(candidates) == 1:
        return choice_of(candidates[0], effort)
    attempts: list[Attempt] = []
    for shape in candidates:
        try:
            attempts.append(Attempt(shape=shape, step_s=choice_of(shape, "quick").step_s))
        except PfeifeError as problem:
            attempts.append(Attempt(shape=shape, problem=problem))
    ranked = sorted((a for a in attempts if a.step_s is not None), key=lambda attempt: attempt.step_s or 0.0)
    if not ranked:
        raise _hardest_try(attempts)
    finalists = [a.shape for a in ranked[:_FINALISTS] if (a.step_s or 0.0) <= _CLOSE * (ranked[0].step_s or 0.0)]
    best = min((choice_of(shape, effort) for shape in finalists), key=lambda choice: choice.step_s)
    return replace(best, attempts=(*ranked, *(attempt for attempt in attempts if attempt.step_s is None)))


def _hardest_try(attempts: Sequence[Attempt]) -> PfeifeError:
    last = max(attempts, key=lambda a: (-a.shape.num_replicas, a.shape.num_microbatches))
    assert last.problem is not None
    return last.problem


def all_reduce_s(planned: Planned, graph: CostGraph, machine: Machine, shape: Shape) -> float:
    """Seconds that the replicas need to add up their gradients, on the rank with the most of them."""
    if shape.num_replicas == 1:
        return 0.0
    others = shape.num_replicas - 1
    pipeline = len(planned.schedule.per_rank)
    bounds = (0, *planned.cuts, len(graph.nodes))
    longest_s = 0.0
    for rank in range(pipeline):
        sizes: dict[int, int] = {}
        for stage, owner in enumerate(planned.stage_ranks):
            if owner == rank:
                nodes = graph.nodes[bounds[stage] : bounds[stage + 1]]
                # What has no state beside itself is frozen, or a buffer.
                sizes |= {u.owner: u.num_bytes for n in nodes for u in n.params if u.state_bytes > u.num_bytes}
        link = machine.link_of(rank, rank + pipeline)
        part_bytes = sum(sizes.values()) // shape.num_replicas
        longest_s = max(longest_s, 2 * others * link.transfer_s(part_bytes))
    return longest_s
