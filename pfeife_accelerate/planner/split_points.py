"""Cuts where the user wants them.

Models: split points that name modules or operations. Ignores: whether that is a good idea.
"""

from __future__ import annotations

from collections.abc import Sequence

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.ir import OpGraph

__all__ = ["cuts_at"]


def cuts_at(graph: OpGraph, split_points: Sequence[str], num_stages: int) -> tuple[int, ...]:
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
    return tuple(sorted(cuts))


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
