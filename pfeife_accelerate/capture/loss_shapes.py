"""Rules for operations that move entries without computing: views, slices, concatenations."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import (
    LossBuilder,
    Result,
    Rule,
    arguments,
    dims_of,
    emit_same,
    name,
    refusal,
    shape,
    source_of,
)
from pfeife_accelerate.capture.loss_pointwise import share, unchanged_state
from pfeife_accelerate.capture.loss_reductions import without_dims
from pfeife_accelerate.capture.loss_states import PARTIAL, State, StateKind, Window

aten = torch.ops.aten


def view(b: LossBuilder, node: fx.Node) -> Result:
    """Reshapes: whatever precedes the batch must still precede it, then the batch's dimension scales with the items."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    before, after = shape(source), shape(node)
    per_item = state.rows * prod(before[state.dim + 1 :])
    for dim, size in enumerate(after):
        rows, left_over = divmod(size, state.window.items)
        if (
            prod(after[:dim]) == prod(before[: state.dim])
            and not left_over
            and rows * prod(after[dim + 1 :]) == per_item
        ):
            sizes: list[Any] = list(after)
            sizes[dim] = b.emit(operator.mul, b.items(state), rows)
            return b.emit(aten.reshape.default, b.micro[source], sizes), replace(state, dim=dim, rows=rows)
    raise refusal(node)


def expand(b: LossBuilder, node: fx.Node) -> Result:
    """Broadcasts: the batch dimension keeps its size (-1)."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    sizes = list(shape(node))
    dim = state.dim + len(sizes) - len(shape(source))
    sizes[dim] = -1
    return b.emit(aten.expand.default, b.micro[source], sizes), replace(state, dim=dim)


def repeat(b: LossBuilder, node: fx.Node) -> Result:
    """Copies along dimensions other than the batch."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    repeats = arguments(node)["repeats"]
    dim = state.dim + len(repeats) - len(shape(source))
    if repeats[dim] != 1:
        raise refusal(node)
    return emit_same(b, node, replace(state, dim=dim))


def unsqueeze(b: LossBuilder, node: fx.Node) -> Result:
    """A new dimension of size one."""
    _, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    at = arguments(node)["dim"] % len(shape(node))
    return emit_same(b, node, replace(state, dim=state.dim + (at <= state.dim)))


def squeeze(b: LossBuilder, node: fx.Node) -> Result:
    """Dimensions of size one dropped, by name: a micro-batch of one row must keep its batch dimension."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    before = shape(source)
    dims = tuple(d for d in dims_of(arguments(node).get("dim"), len(before)) if before[d] == 1)
    if state.dim in dims:
        raise refusal(node)
    return b.emit(aten.squeeze.dims, b.micro[source], list(dims)), without_dims(state, dims)


def permute(b: LossBuilder, node: fx.Node) -> Result:
    """Dimensions in another order."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    ndim, given = len(shape(source)), arguments(node)
    order = list(range(ndim))
    match name(node):
        case "permute.default":
            order = [d % ndim for d in given["dims"]]
        case "transpose.int":
            i, j = given["dim0"] % ndim, given["dim1"] % ndim
            order[i], order[j] = j, i
        case _:
            order.reverse()
    return emit_same(b, node, replace(state, dim=order.index(state.dim)))


def select(b: LossBuilder, node: fx.Node) -> Result:
    """One entry of a dimension that is not the batch."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    dim = arguments(node)["dim"] % len(shape(source))
    if dim == state.dim:
        raise refusal(node)
    return emit_same(b, node, without_dims(state, (dim,)))


def slice_(b: LossBuilder, node: fx.Node) -> Result:
    """A part of a dimension; of the batch itself only whole items, one after the other."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    given = arguments(node)
    dim, size = given["dim"] % len(shape(source)), shape(source)[given["dim"]]
    if dim != state.dim:
        return emit_same(b, node, state)
    start, stop, step = slice(given["start"], given["end"]).indices(size)
    if given["step"] != step:
        raise refusal(node)
    return _window(b, node, source, state, start, stop)


def _window(b: LossBuilder, node: fx.Node, source: fx.Node, state: State, start: int, stop: int) -> Result:
    """Entries `start` to `stop` of a split value's batch dimension."""
    if stop <= start or start % state.rows or stop % state.rows:
        raise refusal(node)
    outer, first = state.window, state.window.start
    inner = Window(first + start // state.rows, first + stop // state.rows)
    if inner == outer:
        return b.micro[source], state
    kept = replace(state, window=inner)
    offset = b.emit(operator.mul, b.offset(outer, inner), state.rows)
    length = b.emit(operator.mul, b.items(kept), state.rows)
    return b.emit(aten.narrow.default, b.micro[source], state.dim, offset, length), kept


def pieces(b: LossBuilder, node: fx.Node) -> Result:
    """`split`, `chunk`, `unbind`: several results at once."""
    source, state = source_of(b, node)
    given, extent = arguments(node), shape(source)
    dim = given["dim"] % len(extent)
    unbound = name(node).startswith("unbind")
    if not state.is_split or dim != state.dim:
        return emit_same(b, node, without_dims(state, (dim,), keepdim=not unbound) if state.is_split else state)
    if unbound:
        raise refusal(node)
    sizes = given["split_sizes"] if "split_sizes" in given else given["split_size"]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent[dim] - at) for at in range(0, extent[dim], sizes)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    b.pieces[node] = [_window(b, node, source, state, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return b.pieces[node][0]


def getitem(b: LossBuilder, node: fx.Node) -> Result:
    """One of several results of an operation."""
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    if source in b.pieces:
        return b.pieces[source][index]
    return b.emit(operator.getitem, b.micro[source], index), b.state(source)


def pad(b: LossBuilder, node: fx.Node) -> Result:
    """Padding of dimensions that are not the batch."""
    source, state = source_of(b, node)
    amounts = arguments(node)["pad"]
    from_the_end = len(shape(source)) - 1 - state.dim
    if state == PARTIAL or (state.is_split and any(amounts[2 * from_the_end : 2 * from_the_end + 2])):
        raise refusal(node)
    return emit_same(b, node, state)


def cat_or_stack(b: LossBuilder, node: fx.Node) -> Result:
    """Several values side by side, along a dimension that is not the batch."""
    given = arguments(node)
    parts: list[fx.Node] = list(given["tensors"])
    stacked = name(node).startswith("stack")
    dim = given["dim"] % len(shape(node))
    states = {b.state(p) for p in parts if not b.is_constant(p)}
    if StateKind.SPLIT not in {s.kind for s in states}:
        if PARTIAL not in states:
            return emit_same(b, node, states.pop())
        return b.emit(node.target, [share(b, p, node) for p in parts], dim), PARTIAL  # type: ignore[arg-type]
    state = states.pop()
    ndim = len(shape(node)) - stacked
    if states or (dim == state.dim and not stacked) or any(len(shape(p)) != ndim for p in parts):
        raise refusal(node)
    micro = [b.cut(p, state) if b.is_constant(p) else b.micro[p] for p in parts]
    out = replace(state, dim=state.dim + (stacked and dim <= state.dim))
    return b.emit(node.target, micro, dim), out  # type: ignore[arg-type]


def _table(rules: Iterable[tuple[Rule, str]]) -> dict[str, Rule]:
    return {operation: rule for rule, operations in rules for operation in operations.split()}


SHAPE_RULES: dict[str, Rule] = _table(
    (
        (view, "view.default _unsafe_view.default reshape.default"),
        (expand, "expand.default"),
        (repeat, "repeat.default"),
        (unsqueeze, "unsqueeze.default"),
        (squeeze, "squeeze.default squeeze.dim squeeze.dims"),
        (permute, "permute.default t.default transpose.int"),
        (select, "select.int"),
        (slice_, "slice.Tensor"),
        (pieces, "split.Tensor split_with_sizes.default unbind.int"),
        (pad, "constant_pad_nd.default"),
        (cat_or_stack, "cat.default stack.default"),
        (getitem, "getitem"),
    )
)
