"""Rules for matrix products."""

from __future__ import annotations

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, Rule, arguments, refusal, shape
from pfeife_accelerate.capture.loss_states import State, StateKind

aten = torch.ops.aten


def rows_times_matrix(b: LossBuilder, node: fx.Node) -> Result:
    """`x @ W` with the batch in the rows of x; W is the same for all."""
    given = arguments(node)
    left, right = (given["mat1"], given["mat2"]) if "mat1" in given else (given["self"], given["mat2"])
    state = _split_in_front(b, node, left)
    factors = [b.micro[left], _same_for_all(b, node, right)]
    if "mat1" not in given:
        return b.emit(aten.mm.default, *factors), state
    bias = given["self"]
    if len(shape(bias)) > 1 and shape(bias)[-2] != 1:
        raise refusal(node)
    scales = {"beta": given["beta"], "alpha": given["alpha"]}
    return b.emit(aten.addmm.default, _same_for_all(b, node, bias), *factors, **scales), state


def batched_product(b: LossBuilder, node: fx.Node) -> Result:
    """`bmm` over the batch: each item's matrices with its own."""
    given = arguments(node)
    factors = (given["self"], given["mat2"])
    states = {_split_in_front(b, node, f) for f in factors if not b.is_constant(f)}
    if len(states) != 1:
        raise refusal(node)
    state = states.pop()
    return b.emit(aten.bmm.default, *(b.cut(f, state) if b.is_constant(f) else b.micro[f] for f in factors)), state


def rows_times_vector(b: LossBuilder, node: fx.Node) -> Result:
    """`x @ v` with the batch in the rows of x."""
    given = arguments(node)
    state = _split_in_front(b, node, given["self"])
    return b.emit(aten.mv.default, b.micro[given["self"]], _same_for_all(b, node, given["vec"])), state


def _split_in_front(b: LossBuilder, node: fx.Node, factor: fx.Node) -> State:
    if b.is_constant(factor) or not b.state(factor).is_split or b.state(factor).dim != 0:
        raise refusal(node)
    return b.state(factor)


def _same_for_all(b: LossBuilder, node: fx.Node, factor: fx.Node) -> fx.Node:
    if not b.is_constant(factor) and b.state(factor).kind is not StateKind.REPLICATED:
        raise refusal(node)
    result: fx.Node = b.operand(factor)
    return result


PRODUCT_RULES: dict[str, Rule] = {
    "mm.default": rows_times_matrix,
    "addmm.default": rows_times_matrix,
    "bmm.default": batched_product,
    "mv.default": rows_times_vector,
}
