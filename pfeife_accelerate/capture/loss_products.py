"""Rules for matrix products and for picking entries by index."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, Rule, arguments, refusal, shape, source_of
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


def gather(b: LossBuilder, node: fx.Node) -> Result:
    """`gather(x, dim, index)` along a dimension that is not the batch."""
    source, state = source_of(b, node)
    given = arguments(node)
    index = given["index"]
    if not state.is_split or given["dim"] % len(shape(source)) == state.dim or shape(index)[state.dim] != state.extent:
        raise refusal(node)
    if not b.is_constant(index) and b.state(index) != state:
        raise refusal(node)
    micro_index = b.cut(index, state) if b.is_constant(index) else b.micro[index]
    return b.emit(aten.gather.default, b.micro[source], given["dim"], micro_index), state


def index_select(b: LossBuilder, node: fx.Node) -> Result:
    """The same entries of every item."""
    source, state = source_of(b, node)
    given = arguments(node)
    if not state.is_split or given["dim"] % len(shape(source)) == state.dim or not b.is_constant(given["index"]):
        raise refusal(node)
    return b.emit(aten.index_select.default, b.micro[source], given["dim"], b.whole(given["index"])), state


def index(b: LossBuilder, node: fx.Node) -> Result:
    """`x[:, i]` with one constant tensor of integers, on a dimension behind the batch."""
    source, state = source_of(b, node)
    indices = arguments(node)["indices"]
    used = [d for d, i in enumerate(indices) if i is not None]
    if not state.is_split or len(used) != 1 or used[0] <= state.dim or not b.is_constant(indices[used[0]]):
        raise refusal(node)
    if indices[used[0]].meta["val"].dtype in (torch.bool, torch.uint8):
        raise refusal(node)
    micro = [None if i is None else b.whole(i) for i in indices]
    return b.emit(aten.index.Tensor, b.micro[source], micro), replace(state)


PRODUCT_RULES: dict[str, Rule] = {
    "mm.default": rows_times_matrix,
    "addmm.default": rows_times_matrix,
    "bmm.default": batched_product,
    "mv.default": rows_times_vector,
    "gather.default": gather,
    "index_select.default": index_select,
    "index.Tensor": index,
}
