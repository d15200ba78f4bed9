"""Rules for operations that move entries without computing: views, slices, concatenations."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
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
from pfeife_accelerate.capture.loss_operands import taken
from pfeife_accelerate.capture.loss_owned import select_item
from pfeife_accelerate.capture.loss_pointwise import share, unchanged_state
from pfeife_accelerate.capture.loss_reductions import without_dims
from pfeife_accelerate.capture.loss_states import PARTIAL, Split, State, StateKind, Window
from pfeife_accelerate.capture.loss_views import viewed

aten = torch.ops.aten


def view(b: LossBuilder, node: fx.Node) -> Result:
    """Reshapes: afterwards there must be one dimension again whose index tells which group an entry belongs to."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    before, after = shape(source), shape(node)
    for dim in range(len(after)):
        made = viewed(state, before, after, dim)
        if made is not None:
            sizes: list[Any] = list(after)
            sizes[dim] = b.emit(operator.mul, b.items(made.window), made.rows)
            return b.emit(aten.reshape.default, b.micro[source], sizes), made
    for size in after:
        if 1 < size < len(b.everything.groups) and len(b.everything.groups) % size == 0:
            other = len(b.everything.groups) // size
            for parts, run in ((size, 1), (1, size), (other, 1), (1, other)):
                b.suggest(parts, run)
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
    """Copies; along the batch, of the whole window one after the other."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    repeats = arguments(node)["repeats"]
    dim = state.dim + len(repeats) - len(shape(source))
    if repeats[dim] == 1:
        return emit_same(b, node, replace(state, dim=dim))
    groups = known_groups(b, node, state) * repeats[dim]
    if not groups:
        raise refusal(node)
    return emit_same(b, node, Split(dim, state.rows, Window(groups)))


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
    """One entry of a dimension."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    given, extent = arguments(node), shape(source)
    dim = given["dim"] % len(extent)
    if dim == state.dim:
        return select_item(b, node, source, state, given["index"] % extent[dim])
    return emit_same(b, node, without_dims(state, (dim,)))


def slice_(b: LossBuilder, node: fx.Node) -> Result:
    """A part of a dimension."""
    source, state = source_of(b, node)
    if not state.is_split:
        return unchanged_state(b, node)
    given = arguments(node)
    dim, size = given["dim"] % len(shape(source)), shape(source)[given["dim"]]
    if dim != state.dim:
        return emit_same(b, node, state)
    start, stop, step = slice(given["start"], given["end"], given["step"]).indices(size)
    if step > 1:
        b.suggest(1, step)
    return window(b, node, source, state, range(start, max(start, stop), step))


def window(b: LossBuilder, node: fx.Node, source: fx.Node, state: State, entries: range | tuple[int, ...]) -> Result:
    """These entries of a split value's batch dimension, in this order."""
    if len(entries) == state.extent and all(i == entry for i, entry in enumerate(entries)):
        return b.micro[source], state
    if not entries:
        raise refusal(node)
    if isinstance(entries, range):
        _suggest_parts(b, state, entries)
    groups, rows = known_groups(b, node, state), state.rows
    if isinstance(entries, range) and entries.step == 1 and not entries.start % rows and not entries.stop % rows:
        entries = range(entries.start // rows, entries.stop // rows)
    elif rows > 1:
        groups, rows = tuple(g for g in groups for _ in range(rows)), 1
    kept = Split(state.dim, rows, Window(tuple(groups[entry] for entry in entries)))
    places = b.places(Window(groups), entries, rows)
    return b.emit(taken, b.micro[source], state.dim, places), kept


def _suggest_parts(b: LossBuilder, state: State, entries: range) -> None:
    """Equal parts that begin where these entries do."""
    if state.window == b.everything and len(entries) and not state.extent % len(entries):
        b.suggest(state.extent // len(entries), 1)


def known_groups(b: LossBuilder, node: fx.Node, state: State) -> tuple[int, ...]:
    """The groups of a window that is known before the step."""
    if state.window.picks is not None:
        raise refusal(node)
    return state.window.groups


def pieces(b: LossBuilder, node: fx.Node) -> Result:
    """`split`, `chunk`, `unbind`: several results at once."""
    source, state = source_of(b, node)
    given, extent = arguments(node), shape(source)
    dim = given["dim"] % len(extent)
    unbound = name(node).startswith("unbind")
    if not state.is_split or dim != state.dim:
        return emit_same(b, node, without_dims(state, (dim,), keepdim=not unbound) if state.is_split else state)
    if unbound:
        b.pieces[node] = [select_item(b, node, source, state, i) for i in range(extent[dim])]
        return b.pieces[node][0]
    sizes = given["split_sizes"] if "split_sizes" in given else given["split_size"]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent[dim] - at) for at in range(0, extent[dim], sizes)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    ranges = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    b.pieces[node] = [window(b, node, source, state, entries) for entries in ranges]
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
    ndim = len(shape(node)) - stacked
    if any(len(shape(p)) != ndim for p in parts):
        raise refusal(node)
    if not stacked and all(s.is_split and s.dim == dim for s in states):
        return _cat_of_items(b, node, parts, dim)
    state = states.pop()
    if states or (dim == state.dim and not stacked):
        raise refusal(node)
    micro = [b.cut(p, state) if b.is_constant(p) else b.micro[p] for p in parts]
    out = replace(state, dim=state.dim + (stacked and dim <= state.dim))
    return b.emit(node.target, micro, dim), out  # type: ignore[arg-type]


def _cat_of_items(b: LossBuilder, node: fx.Node, parts: list[fx.Node], dim: int) -> Result:
    """`cat` along the batch: the items of the one, then those of the other."""
    if any(b.is_constant(p) for p in parts):
        raise refusal(node)
    groups: list[int] = []
    for part in parts:
        groups += [g for g in known_groups(b, node, b.state(part)) for _ in range(b.state(part).rows)]
    micro = [b.micro[p] for p in parts]
    return b.emit(node.target, micro, dim), Split(dim, 1, Window(tuple(groups)))  # type: ignore[arg-type]


def diagonal(b: LossBuilder, node: fx.Node) -> Result:
    """The diagonal of two dimensions that are not the batch."""
    source, state = source_of(b, node)
    given, ndim = arguments(node), len(shape(source))
    dims = (given["dim1"] % ndim, given["dim2"] % ndim)
    if not state.is_split or state.dim in dims:
        raise refusal(node)
    return emit_same(b, node, without_dims(state, dims))


def unfold(b: LossBuilder, node: fx.Node) -> Result:
    """Overlapping windows of a dimension that is not the batch."""
    source, state = source_of(b, node)
    if not state.is_split or arguments(node)["dimension"] % len(shape(source)) == state.dim:
        raise refusal(node)
    return emit_same(b, node, state)


def flip(b: LossBuilder, node: fx.Node) -> Result:
    """`flip`; along the batch it leaves the items in the opposite order."""
    source, state = source_of(b, node)
    dims = dims_of(arguments(node)["dims"], len(shape(source)))
    if state == PARTIAL:
        raise refusal(node)
    if state.is_split and state.dim in dims:
        state = Split(state.dim, state.rows, Window(known_groups(b, node, state)[::-1]))
    return emit_same(b, node, state)


def roll(b: LossBuilder, node: fx.Node) -> Result:
    """`roll` along one dimension."""
    source, state = source_of(b, node)
    given, extent = arguments(node), shape(source)
    if not state.is_split or len(given["dims"]) != 1:
        raise refusal(node)
    if given["dims"][0] % len(extent) != state.dim:
        return emit_same(b, node, state)
    size = state.extent
    return window(b, node, source, state, tuple((i - given["shifts"][0]) % size for i in range(size)))


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
        (diagonal, "diagonal.default"),
        (unfold, "unfold.default"),
        (flip, "flip.default"),
        (roll, "roll.default"),
        (cat_or_stack, "cat.default stack.default"),
        (getitem, "getitem"),
    )
)
