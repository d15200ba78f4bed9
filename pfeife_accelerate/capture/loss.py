"""Loss algebra: turn a loss over the whole batch into one a micro-batch at a time whose sum is the same loss.

The recorded expression is traced to ATen operations on fake whole-batch tensors. Every value that depends on the
pipeline's outputs carries a state, in the sense of DTensor's placements:

- `Split(dim, rows, window)`: dimension `dim` carries the batch, `rows` entries an item of the window;
- `Owned(group)`: it is made of rows of one group alone, so one micro-batch has all of it and the others nothing;
- `PARTIAL`: the whole-batch value is the sum of the micro-batches' values;
- `REPLICATED`: the same for every micro-batch.

A micro-batch has whole groups of rows. At first every row is a group; a loss that compares rows with others (the halves
of a batch, pairs of rows) is tried again with groups of the rows that it seems to take together.

What depends on constants alone (labels, masks, weights, the denominators made of them) is computed once, on the whole
batch, and cut where a split value meets it. A mean becomes a share of the whole batch's mean. An expression with an
operation that fits no rule is refused, and the caller takes the exact two-phase order instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from pfeife_accelerate.capture.custom_functions import CustomFunction
from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, refusal
from pfeife_accelerate.capture.loss_operands import Rows, WholeValues
from pfeife_accelerate.capture.loss_owned import run_if_owned
from pfeife_accelerate.capture.loss_rules import apply_rule, draws_random_numbers
from pfeife_accelerate.capture.loss_states import PARTIAL, REPLICATED, Refused, Split, State, StateKind
from pfeife_accelerate.capture.loss_trace import trace, trace_with_free_numbers
from pfeife_accelerate.compat import FakeTensorMode
from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups

__all__ = ["Rows", "SplitLoss", "WholeValues", "split"]


class SplitLoss:
    """A loss that can be computed a micro-batch at a time, each of whole `groups` of rows."""

    def __init__(
        self,
        builder: LossBuilder,
        groups: RowGroups,
        constant_gm: fx.GraphModule,
        micro_gm: fx.GraphModule,
        scalars: Sequence[State],
    ) -> None:
        self.groups = groups
        self._constants = constant_gm
        self._micro = micro_gm
        self._operands = tuple(builder.operands)
        self._scalars = tuple(scalars)
        self._lasting = WholeValues(values=()).lasting
        self.fixed_numbers: tuple[float, ...] | None = None
        """The expression's numbers, if it holds for them alone."""
        self.kinds: tuple[StateKind, ...] = tuple(state.kind for state in scalars)

    def prepare(self, constants: Sequence[torch.Tensor], numbers: Sequence[float]) -> WholeValues:
        """Compute, once a step and on the whole batch, all that depends on constants alone."""
        trainable = tuple(c for c in constants if c.requires_grad)
        fixed = [c for c in constants if not c.requires_grad]
        device = fixed[0].device.type if fixed else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False):
            inputs = (*fixed, *(numbers if self.fixed_numbers is None else ()))
            return WholeValues(values=tuple(self._constants(*inputs)), trainable=trainable, lasting=self._lasting)

    def run(self, leaves: Sequence[torch.Tensor], whole: WholeValues, rows: Rows) -> tuple[torch.Tensor, ...]:
        """This micro-batch's contribution to every scalar of the expression, the loss first (with autograd)."""
        operands = [operand.of(whole, rows) for operand in self._operands]
        with torch.autocast(leaves[0].device.type, enabled=False):  # the casts are in the graph
            return tuple(self._micro(*leaves, *whole.trainable, *operands))

    def total(self, scalar: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole-batch value of a scalar from the micro-batches' contributions."""
        match self.kinds[scalar]:
            case StateKind.REPLICATED:
                return parts[-1]
            case StateKind.SPLIT:  # one element: one of the parts has it and the others are empty
                return torch.cat(list(parts), self._scalars[scalar].dim)
            case _:
                return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)


def split(expression: Expression, fake_mode: FakeTensorMode, batch_size: int) -> SplitLoss:
    """Work out how the expression splits over micro-batches.

    Raises: Refused, naming the operation, if it does not.
    """
    for step in expression.steps:
        if isinstance(step.operation.func, CustomFunction) and step.operation.grad_enabled:
            raise Refused(f"{step.operation.func.__name__}, a torch.autograd.Function", step.operation.where)
    gm = trace_with_free_numbers(expression, fake_mode)
    fixed = gm is None
    if gm is None:
        gm = trace(expression, fake_mode, expression.numbers)
    loss = _split_in_some_groups(expression, gm, batch_size)
    loss.fixed_numbers = expression.numbers if fixed else None
    return loss


def _split_in_some_groups(expression: Expression, gm: fx.GraphModule, batch_size: int) -> SplitLoss:
    builder = LossBuilder(batch_size, CONTIGUOUS)
    try:
        return _split_in_groups(expression, gm, builder, CONTIGUOUS)
    except Refused as refused:
        first = refused
    for groups in _worth_trying(builder.suggested, batch_size):
        try:
            return _split_in_groups(expression, gm, LossBuilder(batch_size, groups), groups)
        except Refused:
            continue
    raise first


def _worth_trying(suggested: Iterable[RowGroups], batch_size: int) -> list[RowGroups]:
    """Groups by how many of them there are, most first; no more than a few."""
    usual = (RowGroups(parts=2), RowGroups(run=2))
    fit = [g for g in dict.fromkeys((*suggested, *usual)) if g.rows_per_group > 1 and g.fits(batch_size)]
    several = [g for g in fit if g.number(batch_size) > 1]
    return sorted(several, key=lambda groups: groups.rows_per_group)[:8]


def _split_in_groups(expression: Expression, gm: fx.GraphModule, builder: LossBuilder, groups: RowGroups) -> SplitLoss:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, leaf in zip(placeholders, expression.leaf_info, strict=False):
        state = REPLICATED
        if leaf.batch_dim is not None:
            state = Split(leaf.batch_dim, leaf.rows_per_item, builder.everything)
            if node.meta["val"].shape[leaf.batch_dim] != state.extent:
                raise Refused(f"outputs of calls with different batch sizes ({leaf.value})", "")
        builder.leaf(node, state)
    others = placeholders[len(expression.leaves) :]
    for node, constant in zip(others, expression.constants, strict=False):
        if any(constant is count for count in expression.counts):
            builder.counts.add(node)
        if constant.requires_grad:
            builder.leaf(node, REPLICATED)
        else:
            builder.constants[node] = builder.constant_graph.placeholder(node.name)
    for node in others[len(expression.constants) :]:  # numbers
        builder.constants[node] = builder.constant_graph.placeholder(node.name)
    for node in gm.graph.nodes:
        match node.op:
            case "call_function":
                _split_node(builder, node)
            case "get_attr":
                builder.constants[node] = builder.constant_graph.get_attr(node.target)
            case "output":
                return _finish(builder, groups, gm, node.args[0])
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
        changed = _changed_without_gradient
        if state.kind is StateKind.OWNED:
            return run_if_owned(builder, state.group, changed, (builder.micro[original], micro), {}), state
        return builder.emit(changed, builder.micro[original], micro), state
    if node.meta.get("detached") and isinstance(node.meta.get("val"), torch.Tensor):
        if state.kind is StateKind.OWNED:
            return run_if_owned(builder, state.group, torch.ops.aten.detach.default, (micro,), {}), state
        return builder.emit(torch.ops.aten.detach.default, micro), state
    return micro, state


def _changed_without_gradient(original: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """`original` after an in-place change under no_grad: the new values, the old gradient."""
    return torch.where(original == changed, original, original + (changed - original).detach())


def _finish(builder: LossBuilder, groups: RowGroups, gm: fx.GraphModule, outputs: Sequence[fx.Node]) -> SplitLoss:
    states, results = [], []
    with builder.as_partial(n for n in set(outputs) if not builder.is_constant(n)):
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
    constants, micro = fx.GraphModule(gm, builder.constant_graph), fx.GraphModule(gm, builder.micro_graph)
    return SplitLoss(builder, groups, constants, micro, states)
