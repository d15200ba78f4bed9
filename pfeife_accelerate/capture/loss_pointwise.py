"""Rules for operations element by element, and for what may be done to a partial sum."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import (
    LossBuilder,
    Result,
    Rule,
    arguments,
    emit_same,
    name,
    refusal,
    shape,
    source_of,
    words,
)
from pfeife_accelerate.capture.loss_states import PARTIAL, REPLICATED, State, StateKind

aten = torch.ops.aten


def pointwise(b: LossBuilder, node: fx.Node) -> Result:
    """Split operands must be aligned; constants are cut where they carry the batch."""
    operands = [n for n in node.all_input_nodes if not b.is_constant(n)]
    kinds = {b.state(n).kind for n in operands}
    if StateKind.PARTIAL in kinds:
        return linear(b, node)
    if kinds == {StateKind.REPLICATED}:
        return emit_same(b, node, REPLICATED)
    aligned = Alignment(b, node, shape(node))
    args, kwargs = fx.map_arg((node.args, node.kwargs), aligned.operand)
    return b.emit(node.target, *args, **kwargs), aligned.state  # type: ignore[arg-type]


class Alignment:
    """Operands broadcast against each other, of which at least one is split: all must agree where the batch is."""

    def __init__(self, b: LossBuilder, node: fx.Node, broadcast: Sequence[int]) -> None:
        self._b = b
        self._node = node
        self._ndim = len(broadcast)
        states = {
            replace(s, dim=s.dim + self._ndim - len(shape(n)))
            for n in node.all_input_nodes
            if not b.is_constant(n) and (s := b.state(n)).kind is not StateKind.REPLICATED
        }
        if len(states) != 1:
            raise refusal(node)
        self.state: State = states.pop()
        if not self.state.is_split or broadcast[self.state.dim] != self.state.extent:
            raise refusal(node)

    def operand(self, n: fx.Node) -> fx.Node:
        """The micro-batch's part of an operand."""
        own_dim = self.state.dim - (self._ndim - len(shape(n)))
        carries = own_dim >= 0 and shape(n)[own_dim] != 1
        if carries:
            return self._b.part(n, replace(self.state, dim=own_dim), self._node)
        return self._b.same(n, self._node)


_LINEAR_UNARY = frozenset(
    words("""neg.default positive.default clone.default detach.default alias.default lift_fresh_copy.default
    view.default _unsafe_view.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims expand.default
    repeat.default permute.default t.default transpose.int select.int slice.Tensor
    sum.default sum.dim_IntList mean.default mean.dim""")
)


def linear(b: LossBuilder, node: fx.Node) -> Result:
    """Operations on partial sums: only linear ones keep the sum of the parts equal to the whole."""
    operands = [n for n in node.all_input_nodes if not b.is_constant(n)]
    kinds = [b.state(n).kind for n in operands]
    if StateKind.SPLIT in kinds:
        raise refusal(node)
    num_partial, operation = kinds.count(StateKind.PARTIAL), name(node)
    numerator = b.states.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None  # type: ignore[call-overload]
    if operation in _LINEAR_UNARY and num_partial == len(operands) == 1:
        return emit_same(b, node, PARTIAL)
    if operation == "_to_copy.default" and _is_floating(node):
        return emit_same(b, node, PARTIAL)
    if operation in ("mul.Tensor", "mul.Scalar") and num_partial == 1 and _uses(node, operands, b) == 1:
        return emit_same(b, node, PARTIAL)
    if (
        operation in ("div.Tensor", "div.Scalar")
        and num_partial == 1
        and _uses(node, operands, b) == 1
        and numerator == PARTIAL
    ):
        return emit_same(b, node, PARTIAL)
    if operation in _SUMS and _is_floating(node):
        return _sum_of_terms(b, node)
    raise refusal(node)


_SUMS = frozenset(words("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor where.self"))


def _uses(node: fx.Node, operands: Sequence[fx.Node], b: LossBuilder) -> int:
    """How often partial sums occur among the arguments: in `x * x` once among the inputs, but twice here."""
    return sum(isinstance(a, fx.Node) and a in operands and b.state(a).kind is StateKind.PARTIAL for a in node.args)


def _is_floating(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.dtype.is_floating_point or value.dtype.is_complex)


def _sum_of_terms(b: LossBuilder, node: fx.Node) -> Result:
    args = list(node.args)
    if name(node) == "where.self":
        if not b.is_constant(args[0]) and b.state(args[0]).kind is StateKind.PARTIAL:  # type: ignore[arg-type]
            raise refusal(node)
        return b.emit(aten.where.self, b.operand(args[0]), *(share(b, a, node) for a in args[1:])), PARTIAL
    left, right, *rest = (share(b, a, node) if i < 2 else a for i, a in enumerate(args))
    if name(node).startswith("rsub"):
        if arguments(node)["alpha"] != 1:
            raise refusal(node)
        return b.emit(operator.sub, right, left), PARTIAL
    if name(node).endswith("Scalar"):
        alpha = arguments(node)["alpha"]
        scaled = b.emit(operator.mul, right, alpha)
        return b.emit(operator.add if name(node).startswith("add") else operator.sub, left, scaled), PARTIAL
    return b.emit(node.target, left, right, *rest, **node.kwargs), PARTIAL  # type: ignore[arg-type]


def share(b: LossBuilder, value: Any, node: fx.Node) -> Any:
    """A term of a sum with partial terms: what is the same for every micro-batch is given in shares."""
    if isinstance(value, fx.Node) and not b.is_constant(value) and b.state(value).kind is StateKind.PARTIAL:
        return b.micro[value]
    operand = b.operand(value)
    if isinstance(value, fx.Node) and getattr(value.meta["val"], "dtype", None) not in (None, node.meta["val"].dtype):
        operand = b.emit(torch.Tensor.to, operand, node.meta["val"].dtype)  # shares of it need no less precision
    return b.emit(operator.mul, operand, b.fraction(b.everything))


def unchanged_state(b: LossBuilder, node: fx.Node) -> Result:
    """Copies, casts and aliases."""
    _, state = source_of(b, node)
    return linear(b, node) if state == PARTIAL else emit_same(b, node, state)


def detach(b: LossBuilder, node: fx.Node) -> Result:
    """`detach`: the gradient ends here, the state does not change."""
    source, state = source_of(b, node)
    return b.emit(aten.detach.default, b.micro[source]), state


def filled_like(b: LossBuilder, node: fx.Node) -> Result:
    """`zeros_like` and its kin: as large as the micro-batch's part, the same everywhere."""
    _, state = source_of(b, node)
    return emit_same(b, node, state if state.is_split else REPLICATED)


POINTWISE_RULES: dict[str, Rule] = {
    "masked_fill.Tensor": pointwise,
    "log_sigmoid_forward.default": unchanged_state,
    **dict.fromkeys(
        ("_to_copy.default", "clone.default", "lift_fresh_copy.default", "lift_fresh.default", "alias.default"),
        unchanged_state,
    ),
    "detach.default": detach,
    **dict.fromkeys(
        words("zeros_like.default ones_like.default full_like.default empty_like.default fill.Scalar fill.Tensor"),
        filled_like,
    ),
}
