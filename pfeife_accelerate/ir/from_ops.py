"""From a model's operations and what each of them costs to the graph that the planner sees.

Models: one value for each tensor that an operation makes and another reads; parameters by the storage behind their
names; what training keeps of a parameter, as the optimizer has it, where that is known.
Ignores: which tensor of several a reader takes: it is counted as reading them all, and no cut lies between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir.cost_graph import CostGraph, CostNode, CostValue, ParamUse
from pfeife_accelerate.ir.costs import CostTable
from pfeife_accelerate.ir.ops import OpGraph, OpNode

__all__ = ["DEFAULT_STATE_COPIES", "cost_graph_of"]

#: Parameter, gradient and the two states of the Adam family.
DEFAULT_STATE_COPIES = 4
_LOSS_COPIES = 2
# How often a loss such as a cross entropy reads and writes its results: a slice, a softmax in float32, the terms of the
# labels; backward, the gradients of these and the sum of them.
_LOSS_FORWARD_MOVES = 4
_LOSS_BACKWARD_MOVES = 8


def cost_graph_of(
    graph: OpGraph,
    costs: CostTable,
    state: Mapping[str, tuple[int, float]] | None = None,
    *,
    name: str = "model",
    copied: Collection[int] = (),
    bytes_per_s: float = math.inf,
) -> CostGraph:
    """The planner's graph of `graph`.

    `state` gives for a parameter's name (any of a tied group) the bytes of parameter, gradient and optimizer state
    together and the seconds of its optimizer step. What it does not name takes `DEFAULT_STATE_COPIES` of its bytes if
    it wants a gradient, itself alone (a frozen parameter, a buffer) if not, and no time. `copied` are operations whose
    value is not sent, since each reading stage computes it anew, in a time that does not count. `bytes_per_s` is how
    fast the device moves memory: what a loss outside the model takes, by the size of the results it reads.
    """
    if len(costs.ops) != len(graph.nodes):
        raise InternalError(id="PF154", what=f"{len(costs.ops)} costs for a graph of {len(graph.nodes)} operations")
    uses, read = _uses(graph, state or {}), _read_by_loss(graph)
    nodes = tuple(
        CostNode(
            op=node.target,
            forward_s=cost.forward_s + _LOSS_FORWARD_MOVES * read.get(node.index, 0) / bytes_per_s,
            backward_input_s=cost.backward_input_s + _LOSS_BACKWARD_MOVES * read.get(node.index, 0) / bytes_per_s,
            backward_weight_s=cost.backward_weight_s,
            saved_bytes=cost.saved_bytes + _LOSS_COPIES * read.get(node.index, 0),
            workspace_bytes=cost.workspace_bytes,
            params=tuple(dict.fromkeys(uses[param] for param in node.params)),
            cut_allowed=node.cut_allowed,
        )
        for node, cost in zip(graph.nodes, costs.ops, strict=True)
    )
    sent = [node for node in graph.nodes if node.index not in copied]
    values = tuple(value for node in sent for value in _values(node, graph.readers[node.index]))
    return CostGraph(name=name, nodes=nodes, values=values, fingerprint=graph.fingerprint)


def _read_by_loss(graph: OpGraph) -> dict[int, int]:
    """Bytes of the results that a loss outside the model reads, by the operation that makes them.

    It keeps them, and what it is made of, as a softmax of them. A model that gives a single number has its loss inside.
    """
    results = [node for node in graph.nodes if node.name in graph.outputs and node.gradient_bytes]
    if any(math.prod(spec.shape) == 1 for node in results for spec in node.outputs):
        return {}
    return {node.index: node.gradient_bytes for node in results}


def _values(node: OpNode, readers: tuple[int, ...]) -> list[CostValue]:
    return [
        CostValue(
            producer=node.index,
            readers=readers,
            num_bytes=spec.num_bytes,
            gradient_bytes=spec.num_bytes if spec.requires_grad else 0,
        )
        for spec in node.outputs
        if readers
    ]


def _uses(graph: OpGraph, state: Mapping[str, tuple[int, float]]) -> dict[str, ParamUse]:
    """Each parameter's and buffer's use by name: equal for the names of one storage."""
    numbers: dict[str, int] = {}
    known = {graph.owner_of.get(name, name): value for name, value in state.items()}
    found: dict[str, ParamUse] = {}
    for name, spec in graph.params:
        owner = graph.owner_of[name]
        number = numbers.setdefault(owner, len(numbers))
        num_bytes = graph.param_specs[owner].num_bytes
        copies = DEFAULT_STATE_COPIES if spec.requires_grad else 1
        state_bytes, optimizer_s = known.get(owner, (num_bytes * copies, 0.0))
        found[name] = ParamUse(owner=number, num_bytes=num_bytes, state_bytes=state_bytes, optimizer_s=optimizer_s)
    return found
