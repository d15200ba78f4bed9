"""Loss algebra: turn a loss over the whole batch into one a micro-batch at a time whose sum is the same loss.

The recorded expression is traced to ATen operations on fake whole-batch tensors. Every value that depends on the
pipeline's outputs carries a state, in the sense of DTensor's placements:

- `Split(dim, rows, window)`: dimension `dim` carries the batch, `rows` entries an item;
- `PARTIAL`: the whole-batch value is the sum of the micro-batches' values;
- `REPLICATED`: the same for every micro-batch.

What depends on constants alone (labels, masks, weights, the denominators made of them) is computed once, on the whole
batch, and cut where a split value meets it. A mean becomes a share of the whole batch's mean. An expression with an
operation that fits no rule is refused, and the caller takes the exact two-phase order instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, Rows, refusal
from pfeife_accelerate.capture.loss_rules import apply_rule, draws_random_numbers
from pfeife_accelerate.capture.loss_states import PARTIAL, REPLICATED, Refused, Split, State, StateKind
from pfeife_accelerate.capture.loss_trace import trace
from pfeife_accelerate.compat import FakeTensorMode

__all__ = ["Rows", "SplitLoss", "WholeValues", "split"]


@dataclass(frozen=True, kw_only=True)
class WholeValues:
    """Constants of one step: computed on the whole batch, to be passed as they are or cut."""

    values: tuple[Any, ...]


class SplitLoss:
    """A loss that can be computed a micro-batch at a time."""

    def __init__(
        self, builder: LossBuilder, constant_gm: fx.GraphModule, micro_gm: fx.GraphModule, scalars: Sequence[State]
    ) -> None:
        self._constants = constant_gm
        self._micro = micro_gm
        self._operands = tuple(builder.operands)
        self._scalars = tuple(scalars)
        self.kinds: tuple[StateKind, ...] = tuple(state.kind for state in scalars)

    def prepare(self, constants: Sequence[torch.Tensor]) -> WholeValues:
        """Compute, once a step and on the whole batch, all that depends on constants alone."""
        device = constants[0].device.type if constants else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return WholeValues(values=tuple(self._constants(*constants)))

    def run(self, leaves: Sequence[torch.Tensor], whole: WholeValues, rows: Rows) -> tuple[torch.Tensor, ...]:
        """This micro-batch's contribution to every scalar of the expression, the loss first (with autograd)."""
        operands = [operand.of(whole.values, rows) for operand in self._operands]
        with torch.autocast(leaves[0].device.type, enabled=False):  # the casts are in the graph
            return tuple(self._micro(*leaves, *operands))

    def total(self, scalar: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole-batch value of a scalar from the micro-batches' contributions."""
        match self.kinds[scalar]:
            case StateKind.REPLICATED:
                return parts[-1]
            case StateKind.PARTIAL:
                return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
            case StateKind.SPLIT:
                return torch.cat(list(parts), self._scalars[scalar].dim)


def split(expression: Expression, fake_mode: FakeTensorMode, batch_size: int) -> SplitLoss:
    """Work out how the expression splits over micro-batches.

    Raises: Refused, naming the operation, if it does not.
    """
    if any(c.requires_grad for c in expression.constants):
        raise Refused(
            "a trainable tensor outside the model", expression.steps[0].operation.where if expression.steps else ""
        )
    gm = trace(expression, fake_mode)
    builder = LossBuilder(batch_size)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, leaf in zip(placeholders, expression.leaf_info, strict=False):
        state = REPLICATED
        if leaf.batch_dim is not None:
            state = Split(leaf.batch_dim, leaf.rows_per_item, builder.everything)
            if node.meta["val"].shape[leaf.batch_dim] != state.extent:
                raise Refused(f"outputs of calls with different batch sizes ({leaf.value})", "")
        builder.leaf(node, state)
    for node in placeholders[len(expression.leaves) :]:
        builder.constants[node] = builder.constant_graph.placeholder(node.name)
    for node in gm.graph.nodes:
        match node.op:
            case "call_function":
                _split_node(builder, node)
            case "get_attr":
                builder.constants[node] = builder.constant_graph.get_attr(node.target)
            case "output":
                return _finish(builder, gm, node.args[0])
    raise AssertionError("a traced graph ends with its output")


def _split_node(builder: LossBuilder, node: fx.Node) -> None:
    if draws_random_numbers(node):
        raise refusal(node)
    if all(builder.is_constant(n) for n in node.all_input_nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: builder.constants[n])
        builder.constants[node] = builder.constant_graph.call_function(node.target, args, kwargs)
        return
    builder.micro[node], builder.states[node] = _with_gradient(builder, node, apply_rule(builder, node))


def _with_gradient(builder: LossBuilder, node: fx.Node, result: Result) -> Result:
    """End the gradient where the script, or ATen inside an operation, computed without one."""
    micro, state = result
    original = node.meta.get("keeps_gradient_of")
    if original is not None:
        if builder.is_constant(original) or builder.state(original) != state:
            raise refusal(node)
        return builder.emit(_changed_without_gradient, builder.micro[original], micro), state
    if node.meta.get("detached") and isinstance(node.meta.get("val"), torch.Tensor):
        return builder.emit(torch.ops.aten.detach.default, micro), state
    return micro, state


def _changed_without_gradient(original: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """`original` after an in-place change under no_grad: the new values, the old gradient."""
    return torch.where(original == changed, original, original + (changed - original).detach())


def _finish(builder: LossBuilder, gm: fx.GraphModule, outputs: Sequence[fx.Node]) -> SplitLoss:
    states, results = [], []
    for output in outputs:
        if builder.is_constant(output):
            states.append(REPLICATED)
            results.append(builder.whole(output))
        else:
            states.append(builder.state(output))
            results.append(builder.micro[output])
    if states[0] != PARTIAL:
        raise Refused("a loss that does not sum or average over the batch", "")
    builder.micro_graph.output(tuple(results))
    builder.constant_graph.output(tuple(builder.exported))
    return SplitLoss(
        builder, fx.GraphModule(gm, builder.constant_graph), fx.GraphModule(gm, builder.micro_graph), states
    )
