"""Where to cut: the contiguous slicing whose slowest stage is fastest.

Models: forward and backward time of a stage, plus the transfers it waits for: activations into it, gradients back to
it, all of what crosses its two cuts. Exact for that measure, by dynamic programming; among the slicings that are
equally fast, the one whose largest stage needs least memory.
Ignores: order and overlap (the simulator's work), and that a skip connection passes over a stage without stopping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.ir import CostTable, Machine, OpGraph, Slicing

__all__ = ["cuts_at", "equal_memory", "equal_time", "legal_cuts"]

Floats: TypeAlias = npt.NDArray[np.float64]

#: Cut positions that the search looks at; beyond it only the cheapest of each stretch of the graph stay.
MAX_CANDIDATES = 1200


def legal_cuts(graph: OpGraph) -> tuple[int, ...]:
    """Positions where a cut is allowed, both ends of the graph excluded."""
    return tuple(node.index for node in graph.nodes[1:] if node.cut_allowed)


def equal_time(
    graph: OpGraph,
    costs: CostTable,
    machine: Machine,
    num_stages: int,
    split_points: Sequence[str] = (),
    *,
    state_multiplier: float = 4.0,
) -> Slicing:
    """Minimise the slowest stage; `split_points` name the starts of the stages after the first and decide all.

    `state_multiplier`: bytes of parameter, gradient and optimizer state per byte of parameter.
    """
    if split_points:
        return cuts_at(graph, split_points, num_stages)
    if num_stages == 1:
        return Slicing(cuts=())
    bounds, time_s, memory = _stage_matrices(graph, costs, machine, num_stages, state_multiplier)
    slowest_s, _ = _min_max(time_s, num_stages)
    # The same floats are compared as were minimised, so that the optimum itself passes the limit.
    _, path = _min_max(np.where(time_s <= slowest_s, memory, np.inf), num_stages)
    return Slicing(cuts=tuple(int(bounds[position]) for position in path))


def equal_memory(
    graph: OpGraph, costs: CostTable, machine: Machine, num_stages: int, *, state_multiplier: float = 4.0
) -> Slicing:
    """Minimise the memory of the largest stage: the slicing to fall back to where equal time does not fit."""
    if num_stages == 1:
        return Slicing(cuts=())
    bounds, time_s, memory = _stage_matrices(graph, costs, machine, num_stages, state_multiplier)
    largest, _ = _min_max(memory, num_stages)
    _, path = _min_max(np.where(memory <= largest, time_s, np.inf), num_stages)
    return Slicing(cuts=tuple(int(bounds[position]) for position in path))


def _stage_matrices(
    graph: OpGraph, costs: CostTable, machine: Machine, num_stages: int, state_multiplier: float
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Positions b, and for every pair i < j the time and memory of a stage from b[i] to b[j] (infinite otherwise)."""
    candidates = legal_cuts(graph)
    if len(candidates) < num_stages - 1:
        raise PfeifeError(
            id="PF301",
            what=f"the model cannot be cut into {num_stages} stages",
            where=f"{len(graph.nodes)} operations, {len(candidates)} positions where a cut is legal",
            why=f"{num_stages} stages need {num_stages - 1} cuts",
            hints=(f"at most {len(candidates) + 1} stages: fewer processes or num_loops=1",),
        )
    compute = _prefix([op.forward_s + op.backward_s for op in costs.ops])
    kept = _prefix(_first_use_bytes(graph)) * state_multiplier + _prefix([op.saved_bytes for op in costs.ops])
    crossing = np.asarray(graph.crossing_bytes, dtype=np.float64)
    candidates = _thinned(candidates, compute, crossing, max(MAX_CANDIDATES, num_stages))
    bounds = np.asarray((0, *candidates, len(graph.nodes)), dtype=np.int64)
    # Activations are waited for at the start of a stage, gradients at its end; nothing crosses the graph's two ends.
    link = machine.link
    activations_s = link.latency_s + crossing[bounds] / link.bytes_per_s
    gradient_bytes = np.asarray(graph.crossing_gradient_bytes, dtype=np.float64)[bounds]
    gradients_s = np.where(gradient_bytes > 0, link.latency_s + gradient_bytes / link.bytes_per_s, 0.0)
    activations_s[0] = gradients_s[-1] = 0.0
    later = np.triu(np.ones((len(bounds), len(bounds)), dtype=np.bool_), k=1)
    time_s = (compute[bounds] + gradients_s)[None, :] - (compute[bounds] - activations_s)[:, None]
    memory = kept[bounds][None, :] - kept[bounds][:, None]
    return bounds, np.where(later, time_s, np.inf), np.where(later, memory, np.inf)


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def _first_use_bytes(graph: OpGraph) -> list[float]:
    """Parameter bytes of each operation, each parameter (and tied group) at its first use."""
    seen: set[str] = set()
    sizes = []
    for node in graph.nodes:
        new = {graph.owner_of.get(name, name) for name in node.params} - seen
        seen |= new
        sizes.append(float(sum(graph.param_specs[name].num_bytes for name in new if name in graph.param_specs)))
    return sizes


def _thinned(candidates: tuple[int, ...], compute: Floats, crossing: Floats, limit: int) -> tuple[int, ...]:
    """At most `limit` of the candidates: the one with the least crossing bytes of each stretch of equal time.

    Half of the stretches are equal in time, half in number: a few long operations cannot starve the rest of the graph.
    """
    if len(candidates) <= limit:
        return candidates
    positions = np.asarray(candidates)
    stretches = limit // 2
    by_time = np.floor(compute[positions] / max(compute[-1], 1e-30) * stretches).astype(np.int64)
    by_count = np.arange(len(positions)) * stretches // len(positions)
    kept: set[int] = set()
    for stretch in (by_time.clip(max=stretches - 1), by_count):
        order = np.lexsort((positions, crossing[positions], stretch))
        first = np.concatenate(([True], np.diff(stretch[order]) > 0))
        kept.update(int(position) for position in positions[order][first])
    return tuple(sorted(kept))


def _min_max(cost: Floats, num_stages: int) -> tuple[float, list[int]]:
    """The least possible maximum of `cost[i, j]` along a path of `num_stages` steps, and its inner points."""
    best = cost[0]
    came_from = []
    for _ in range(num_stages - 1):
        worst = np.maximum(best[:, None], cost)
        choice = worst.argmin(axis=0)
        best = worst[choice, np.arange(len(choice))]
        came_from.append(choice)
    path, position = [], len(best) - 1
    for choice in reversed(came_from):
        position = int(choice[position])
        path.append(position)
    return float(best[-1]), path[::-1]


# -- cuts by name ------------------------------------------------------------------------------------------------------


def cuts_at(graph: OpGraph, split_points: Sequence[str], num_stages: int) -> Slicing:
    """Cut where the user says: each point names an operation, or a module at whose first parameter use a stage starts.

    Between the use of the previous module's parameters and that first use, the legal position with the least crossing
    bytes is taken (the last of equals): a norm's first operations come before its weight is read.
    """
    if len(split_points) != num_stages - 1:
        raise PfeifeError(
            id="PF303",
            what=f"{len(split_points)} split points for {num_stages} stages",
            why=f"{num_stages} stages need {num_stages - 1} split points, the starts of all stages but the first",
            hints=(f"split_points with {num_stages - 1} names, or another number of processes or num_loops",),
        )
    cuts: dict[int, str] = {}
    for point in split_points:
        position = _position_of(graph, point)
        if position in cuts:
            raise PfeifeError(
                id="PF305",
                what=f"split points {cuts[position]!r} and {point!r} are the same position",
                where=graph.nodes[position].source_line,
                why=f"no operation with a legal cut lies between them (both start at {graph.nodes[position].name!r})",
            )
        cuts[position] = point
    return Slicing(cuts=tuple(sorted(cuts)))


def _position_of(graph: OpGraph, point: str) -> int:
    first, previous = _first_use(graph, point)
    legal = [p for p in range(max(previous + 1, 1), first + 1) if graph.nodes[p].cut_allowed]
    if legal:
        return min(reversed(legal), key=lambda p: graph.crossing_bytes[p])
    for position in range(min(previous, first), 0, -1):
        if graph.nodes[position].cut_allowed:
            return position
    raise PfeifeError(
        id="PF305",
        what=f"no cut is possible at split point {point!r}",
        where=graph.nodes[first].source_line,
        why="it is the start of the model, or no cut is legal at or before it",
    )


def _first_use(graph: OpGraph, point: str) -> tuple[int, int]:
    """The operation that `point` names, and the one before it that bounds the search for a cut."""
    if point in graph.index_of:
        position = graph.index_of[point]
        return position, position - 1
    previous = -1
    for node in graph.nodes:
        if any(name == point or name.startswith(point + ".") for name in node.params):
            return node.index, previous
        if node.params:
            previous = node.index
    modules = {name.rsplit(".", depth)[0] for name, _ in graph.params for depth in range(name.count(".") + 1)}
    near = did_you_mean(point, sorted(modules) + sorted(graph.index_of))
    raise PfeifeError(
        id="PF304",
        what=f"unknown split point {point!r}",
        why="a split point names a module that owns parameters, or an operation of the captured graph",
        hints=(f"did you mean {near!r}?",) if near else (),
    )
