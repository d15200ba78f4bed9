"""Rules for picking entries by constant tensors of positions: `x[mask]`, `x[rows, positions]`, `gather`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, Rule, arguments, name, refusal, shape, source_of
from pfeife_accelerate.capture.loss_shapes import known_groups, window
from pfeife_accelerate.capture.loss_states import Split, State, Window
from pfeife_accelerate.compat import OpOverload

aten = torch.ops.aten


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
    "index_select.default": index_select,
    "index.Tensor": index,
}
