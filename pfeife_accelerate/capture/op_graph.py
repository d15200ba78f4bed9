"""The planner's view of a captured graph, and how a plan made for one graph is followed in another of the same model.

A new length, evaluation, or a changed flag gives a graph of its own. Parameters do not move for it: every operation
stays on a stage that holds its parameters, and the cuts go where the fewest bytes cross between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind
from pfeife_accelerate.capture.nodes import inputs_of, source_line, target_name, tensors_in
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import OpGraph, OpNode, TensorSpec


def to_op_graph(graph: CapturedGraph, bindings: Mapping[Any, int]) -> OpGraph:
    """The graph as plain data, with sizes for a micro-batch whose size symbols have these values."""
    specs = {p.node: _specs(graph, p.node, bindings) for p in graph.placeholders}
    states = [p for p in graph.placeholders if p.kind is PlaceholderKind.STATE]
    inputs = [p for p in graph.placeholders if p.kind is PlaceholderKind.INPUT]
    known = set(graph.ops) | {p.node for p in (*states, *inputs)}
    names = {p.node: p.state_name or p.node.name for p in states}
    taken = set(names.values())  # a buffer may have an operation's name: `mean`

    def name_of(node: fx.Node) -> str:
        return names.get(node) or (f"{node.name}'" if node.name in taken else node.name)

    nodes = tuple(
        OpNode(
            index=index,
            name=name_of(node),
            target=target_name(node),
            inputs=tuple(name_of(n) for n in inputs_of(node) if n in known),
            outputs=_specs(graph, node, bindings),
            params=graph.states_of(node),
            source_line=source_line(node),
            cut_allowed=graph.cut_allowed[index],
        )
        for index, node in enumerate(graph.ops)
    )
    return OpGraph(
        nodes=nodes,
        inputs=tuple((name_of(p.node), specs[p.node][0]) for p in inputs),
        outputs=tuple(name_of(graph.node_of[name]) for name in graph.result_names()),
        params=tuple({names[p.node]: specs[p.node][0] for p in states}.items()),
    )


def _specs(graph: CapturedGraph, node: fx.Node, bindings: Mapping[Any, int]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            shape=graph.concrete(tuple(t.shape), bindings),
            dtype=str(t.dtype).removeprefix("torch."),
            requires_grad=t.requires_grad,
        )
        for t in tensors_in(node.meta.get("example_value"))
    )


def follow(
    graph: CapturedGraph, op_graph: OpGraph, stages_of_state: Mapping[str, Sequence[int]], num_stages: int
) -> tuple[int, ...]:
    """Cuts for `graph` that keep every operation with parameters on a stage that holds them.

    A stage without operations is a last resort: for a graph that uses few of the parameters.
    Raises: PfeifeError PF221 if the order of the operations makes that impossible.
    """
    last_before = [0] * num_stages  # first legal position of cut k: after the last operation bound to a stage < k
    first_after = [len(graph.ops)] * num_stages
    current = 0
    for index, node in enumerate(graph.ops):
        bound = [set(stages_of_state[name]) for name in graph.states_of(node) if stages_of_state.get(name)]
        if not bound:
            continue
        candidates = sorted(s for s in set.intersection(*bound) if s >= current)
        if not candidates:
            raise _cannot_follow(node)
        current = candidates[0]
        for k in range(1, num_stages):
            if current < k:
                last_before[k] = index + 1
            else:
                first_after[k] = min(first_after[k], index)
    cuts: list[int] = []
    end = len(graph.ops)
    for k in range(1, num_stages):
        before = cuts[-1] if cuts else 0
        legal = [
            p
            for p in range(max(last_before[k], before), first_after[k] + 1)
            if p in (before, end) or graph.cut_allowed[p]
        ]
        if not legal:
            raise _cannot_follow(graph.ops[min(last_before[k], end - 1)])
        crossing = {p: op_graph.crossing_bytes[p] if p < end else 0 for p in legal}
        cuts.append(min(legal, key=lambda p: (p in (before, end), crossing[p], p)))
    return tuple(cuts)


def _cannot_follow(node: fx.Node) -> PfeifeError:
    return PfeifeError(
        id="PF221",
        what=f"operation {node.name} cannot run on the stage that holds its parameters",
        where=source_line(node),
        why="this call of the model uses its parameters in another order than the call that the plan was made for",
        hints=("make the first call a typical training step", "give split_points that suit both kinds of call"),
    )


def stages_of_states(graph: CapturedGraph, cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The stages, between these cuts, that read each parameter and buffer."""
    found: dict[str, list[int]] = {}
    for stage, (lo, hi) in enumerate(pairwise((0, *cuts, len(graph.ops)))):
        for name in dict.fromkeys(name for node in graph.ops[lo:hi] for name in graph.states_of(node)):
            found.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in found.items()}
