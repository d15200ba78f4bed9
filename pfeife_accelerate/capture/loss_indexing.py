"""Rules for picking entries by constant tensors of positions: `x[mask]`, `x[rows, positions]`, `gather`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, Rule, arguments, name, refusal, shape, source_of
from pfeife_accelerate.capture.loss_shapes import known_groups, window
from pfeife_accelerate.capture.loss_states import REPLICATED, Split, State, Window
from pfeife_accelerate.compat import OpOverload

aten = torch.ops.aten


def gather(b: LossBuilder, node: fx.Node) -> Result:
    """`gather(x, dim, index)` along a dimension that is not the batch."""
    source, state = source_of(b, node)
    given = arguments(node)
    index = given["index"]
    if not state.is_split or given["dim"] % len(shape(source)) == state.dim or shape(index)[state.dim] != state.extent:
        raise refusal(node)
    return b.emit(aten.gather.default, b.micro[source], given["dim"], b.part(index, state, node)), state


def scatter(b: LossBuilder, node: fx.Node) -> Result:
    """`scatter` and `scatter_add` along a dimension that is not the batch, every row of all operands in use."""
    given = arguments(node)
    tensors = {key: value for key, value in given.items() if isinstance(value, fx.Node)}
    states = {b.state(n) for n in tensors.values() if not b.is_constant(n)} - {REPLICATED}
    if len(states) != 1:
        raise refusal(node)
    state = states.pop()
    if not state.is_split or given["dim"] % len(shape(node)) == state.dim:
        raise refusal(node)
    micro = {key: b.part(n, state, node) for key, n in tensors.items() if len(shape(n))}
    given.update(micro, **{key: b.same(n, node) for key, n in tensors.items() if not len(shape(n))})
    return b.emit(_by_name, node.target, given), state


def _by_name(op: Callable[..., torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
    return op(**given)


def index_select(b: LossBuilder, node: fx.Node) -> Result:
    """Entries of one dimension."""
    source, state = source_of(b, node)
    given = arguments(node)
    if not state.is_split or not b.is_constant(given["index"]):
        raise refusal(node)
    dim = given["dim"] % len(shape(source))
    if dim == state.dim:
        return _pick(b, node, [None] * dim + [given["index"]])
    return b.emit(aten.index_select.default, b.micro[source], dim, b.whole(given["index"])), state


def index(b: LossBuilder, node: fx.Node) -> Result:
    """`x[..., i, j]` with constant tensors of integers."""
    source, state = source_of(b, node)
    indices: list[fx.Node | None] = list(arguments(node)["indices"])
    used = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if not state.is_split or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        raise refusal(node)
    if not all(b.is_constant(i) for i in given):
        raise refusal(node)
    if state.dim in used:
        return _pick(b, node, indices)
    if used[-1] - used[0] != len(used) - 1:  # what they index moves to the front
        raise refusal(node)
    behind = state.dim > used[0]
    ndim = max(len(shape(i)) for i in given)
    micro = [None if i is None else b.whole(i) for i in indices]
    return b.emit(aten.index.Tensor, b.micro[source], micro), replace(
        state, dim=state.dim + (ndim - len(used) if behind else 0)
    )


def _pick(b: LossBuilder, node: fx.Node, indices: Sequence[fx.Node | None]) -> Result:
    """Entries of the batch's dimension, and perhaps of others beside it, by lists of positions of one length."""
    source, state = source_of(b, node)
    used = [d for d, i in enumerate(indices) if i is not None]
    given = {d: i for d, i in enumerate(indices) if i is not None}
    rows_index = given.pop(state.dim)
    length = max(shape(i)[0] if len(shape(i)) == 1 else 0 for i in (rows_index, *given.values()))
    if any(len(shape(i)) != 1 for i in (rows_index, *given.values())) or shape(rows_index)[0] != length or not length:
        raise refusal(node)
    dim = used[0] if used[-1] - used[0] == len(used) - 1 else 0
    known = known_positions(rows_index, b)
    if known is not None and not given:
        return window(b, node, source, state, tuple(p % state.extent for p in known))
    groups = tuple(g for g in known_groups(b, node, state) for _ in range(state.rows))
    if known is not None:
        kept = Split(dim, 1, Window(tuple(groups[p] for p in known)))
    else:
        kept = Split(dim, 1, Window(groups, picks=b.export(rows_index), num_picks=length))
    places = b.picked_places(Window(groups), rows_index)
    others = {d: _beside(b, i, kept) for d, i in given.items()}
    return b.emit(_picked, b.micro[source], state.dim, places, list(others), list(others.values())), kept


def _beside(b: LossBuilder, index: fx.Node, kept: State) -> fx.Node:
    """Positions in another dimension, one for each picked entry or one for all."""
    return b.whole(index) if shape(index)[0] == 1 else b.cut(index, replace(kept, dim=0))


def _picked(
    value: torch.Tensor, dim: int, places: torch.Tensor, other_dims: list[int], others: list[torch.Tensor]
) -> torch.Tensor:
    indices: list[Any] = [None] * (max([dim, *other_dims]) + 1)
    indices[dim] = places.to(value.device)
    for other, positions in zip(other_dims, others, strict=True):
        indices[other] = positions
    return aten.index.Tensor(value, indices)  # type: ignore[no-any-return]


def index_put(b: LossBuilder, node: fx.Node) -> Result:
    """`x[mask] = value`, the positions constant."""
    source, state = source_of(b, node)
    given = arguments(node)
    indices: list[fx.Node | None] = list(given["indices"])
    rows_index = indices[state.dim] if state.is_split and state.dim < len(indices) else None
    used = [i for i in indices if i is not None]
    if rows_index is None or not all(b.is_constant(i) and len(shape(i)) == 1 for i in used):
        raise refusal(node)
    length = shape(rows_index)[0]
    if not length or any(i.meta["val"].dtype is not torch.int64 or shape(i)[0] not in (1, length) for i in used):
        raise refusal(node)
    groups = tuple(g for g in known_groups(b, node, state) for _ in range(state.rows))
    kept = Split(0, 1, Window(groups, picks=b.export(rows_index), num_picks=length))
    micro: list[Any] = [None if i is None else _beside(b, i, kept) for i in indices]
    micro[state.dim] = b.picked_places(Window(groups), rows_index)
    values: fx.Node = given["values"]
    if prod(shape(values)) != 1:
        raise refusal(node)
    return b.emit(_put, b.micro[source], micro, b.same(values, node), given["accumulate"]), state


def _put(value: torch.Tensor, indices: list[Any], values: torch.Tensor, accumulate: bool) -> torch.Tensor:
    places = [None if i is None else i.to(value.device) for i in indices]
    return aten.index_put.default(value, places, values, accumulate)  # type: ignore[no-any-return]


def known_positions(node: fx.Node, b: LossBuilder) -> tuple[int, ...] | None:
    """A constant's integers, if they are the same at every step: written in the script, or 0, 1, 2, ..."""
    if node in b.counts:
        return tuple(range(shape(node)[0]))
    if node.op == "get_attr":
        return tuple(getattr(node.graph.owning_module, str(node.target)).tolist())
    if isinstance(node.target, OpOverload) and name(node) in ("lift_fresh_copy.default", "detach.default"):
        source = node.args[0]
        return known_positions(source, b) if isinstance(source, fx.Node) else None
    return None


INDEXING_RULES: dict[str, Rule] = {
    "gather.default": gather,
    **dict.fromkeys(
        ("scatter.src", "scatter.value", "scatter_add.default", "scatter.reduce", "scatter_reduce.two"), scatter
    ),
    "index_put.default": index_put,
    "index_select.default": index_select,
    "index.Tensor": index,
}
