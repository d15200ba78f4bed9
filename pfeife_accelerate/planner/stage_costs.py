"""What a slicing makes of a graph: the cost of each stage, and what stages hand to each other.

Models: sums by prefix, parameters counted once per stage however often they are read or tied, values sent directly
from producer to each consuming rank. Ignores: parameters shared by two stages of one rank (counted in both).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import CostTable, Edge, OpCost, OpGraph, Slicing, StageCost
from pfeife_accelerate.schedule import Message, Messages

__all__ = ["MessageBytes", "edges_of", "message_bytes_of", "messages_of", "stage_costs", "stage_params"]


@dataclass(frozen=True, kw_only=True)
class MessageBytes:
    """Sizes of one message of one micro-batch; a tuple of them is aligned with the messages it belongs to."""

    forward_bytes: int
    gradient_bytes: int


def stage_params(graph: OpGraph, cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that each stage reads, in order of first use."""
    return tuple(
        tuple(dict.fromkeys(name for node in graph.nodes[first:last] for name in node.params))
        for first, last in Slicing(cuts=tuple(cuts)).ranges(len(graph.nodes))
    )


def stage_costs(graph: OpGraph, costs: CostTable, cuts: Sequence[int]) -> tuple[StageCost, ...]:
    """The cost of each stage on one micro-batch."""
    if len(costs.ops) != len(graph.nodes):
        raise InternalError(
            id="PF310", what=f"{len(costs.ops)} costs for {len(graph.nodes)} operations", where=graph.fingerprint
        )
    ranges = Slicing(cuts=tuple(cuts)).ranges(len(graph.nodes))
    return tuple(
        _stage_cost(graph, costs.ops[first:last], params)
        for (first, last), params in zip(ranges, stage_params(graph, cuts), strict=True)
    )


def _stage_cost(graph: OpGraph, ops: Sequence[OpCost], params: Sequence[str]) -> StageCost:
    saved = list(accumulate(op.saved_bytes for op in ops))
    peak = max((kept + op.workspace_bytes for kept, op in zip(saved, ops, strict=True)), default=0)
    total = saved[-1] if saved else 0
    owners = {graph.owner_of.get(name, name) for name in params}
    return StageCost(
        forward_s=sum(op.forward_s for op in ops),
        backward_s=sum(op.backward_s for op in ops),
        param_bytes=sum(graph.param_specs[name].num_bytes for name in owners if name in graph.param_specs),
        saved_bytes=total,
        workspace_bytes=max(0, peak - total),
    )


def _reading_stages(graph: OpGraph, cuts: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(operation, its stage, later stages that read it) of every tensor that leaves its stage."""
    stage_of = [bisect_right(cuts, index) for index in range(len(graph.nodes))]
    leaving = []
    for index, reads in enumerate(graph.readers):
        stages = tuple(sorted({stage_of[read] for read in reads} - {stage_of[index]}))
        if stages and graph.nodes[index].outputs:
            leaving.append((index, stage_of[index], stages))
    return leaving


def edges_of(graph: OpGraph, cuts: Sequence[int]) -> tuple[Edge, ...]:
    """Every tensor that leaves its stage, in order of production."""
    edges: list[Edge] = []
    for index, producer, consumers in _reading_stages(graph, cuts):
        node = graph.nodes[index]
        names = [node.name] if len(node.outputs) == 1 else [f"{node.name}.{i}" for i in range(len(node.outputs))]
        edges += (
            Edge(producer=producer, consumers=consumers, value=name, spec=spec)
            for name, spec in zip(names, node.outputs, strict=True)
        )
    return tuple(edges)


def messages_of(graph: OpGraph, cuts: Sequence[int], stage_ranks: Sequence[int]) -> Messages:
    """One message for each (producing stage, consuming rank); local hand-overs are among them."""
    return tuple(message for message, _ in _messages(graph, cuts, stage_ranks))


def message_bytes_of(graph: OpGraph, cuts: Sequence[int], stage_ranks: Sequence[int]) -> tuple[MessageBytes, ...]:
    """Sizes aligned with `messages_of`; a value that several stages of a rank read counts once."""
    return tuple(size for _, size in _messages(graph, cuts, stage_ranks))


def _messages(graph: OpGraph, cuts: Sequence[int], stage_ranks: Sequence[int]) -> list[tuple[Message, MessageBytes]]:
    values: dict[tuple[int, int], list[int]] = defaultdict(list)  # (stage, rank) -> operations
    stages: dict[tuple[int, int], set[int]] = defaultdict(set)
    for index, producer, consumers in _reading_stages(graph, cuts):
        for rank in {stage_ranks[consumer] for consumer in consumers}:
            values[producer, rank].append(index)
            stages[producer, rank] |= {consumer for consumer in consumers if stage_ranks[consumer] == rank}
    found = []
    for (producer, rank), indices in sorted(values.items()):
        gradient_bytes = sum(graph.nodes[index].gradient_bytes for index in indices)
        has_grad = any(spec.requires_grad for index in indices for spec in graph.nodes[index].outputs)
        message = Message(
            producer_stage=producer,
            consumer_rank=rank,
            consumer_stages=tuple(sorted(stages[producer, rank])),
            has_grad=has_grad,
        )
        forward_bytes = sum(graph.nodes[index].num_bytes for index in indices)
        found.append((message, MessageBytes(forward_bytes=forward_bytes, gradient_bytes=gradient_bytes)))
    return found
