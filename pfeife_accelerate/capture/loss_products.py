"""Rules for matrix products: the batch in the rows, in the columns, in both factors' items, or summed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, Rule, arguments, name, refusal, shape
from pfeife_accelerate.capture.loss_states import PARTIAL, State, StateKind

aten = torch.ops.aten


def product(b: LossBuilder, node: fx.Node) -> Result:
    """`mm`, `bmm`, `mv`, `dot`: the last dimension of the first factor times the last but one of the second."""
    given = arguments(node)
    left, right = _factors(given)
    state, micro_left, micro_right = _micro_factors(b, node, left, right)
    return b.emit(node.target, micro_left, micro_right), state  # type: ignore[arg-type]


def product_and_sum(b: LossBuilder, node: fx.Node) -> Result:
    """`addmm` and its kin: the added matrix carries the batch where the product does, or is one row for all."""
    given = arguments(node)
    left, right = _factors(given)
    state, micro_left, micro_right = _micro_factors(b, node, left, right)
    if not state.is_split:
        raise refusal(node)
    added: fx.Node = given["self"]
    own_dim = state.dim - (len(shape(node)) - len(shape(added)))
    if own_dim >= 0 and shape(added)[own_dim] != 1:
        micro_added = b.part(added, replace(state, dim=own_dim), node)
    else:
        micro_added = b.same(added, node)
    scales = {key: given[key] for key in ("beta", "alpha")}
    return b.emit(node.target, micro_added, micro_left, micro_right, **scales), state  # type: ignore[arg-type]


def _factors(given: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    left = next(key for key in ("mat1", "batch1", "mat", "self") if key in given)
    right = next(key for key in ("mat2", "batch2", "vec", "tensor") if key in given)
    return given[left], given[right]


def _micro_factors(b: LossBuilder, node: fx.Node, left: fx.Node, right: fx.Node) -> tuple[State, fx.Node, fx.Node]:
    """The product's state and the factors on the micro-batch."""
    split = [n for n in (left, right) if not b.is_constant(n) and b.state(n).kind is not StateKind.REPLICATED]
    if not split or not all(b.state(n).is_split for n in split):
        raise refusal(node)
    ndim = {n: len(shape(n)) for n in (left, right)}
    contracted = {left: ndim[left] - 1, right: max(ndim[right] - 2, 0)}
    first, state = split[0], b.state(split[0])
    other = right if first is left else left
    if left is right:  # the same value twice: as two
        if ndim[left] != 3 or state.dim != 0:
            raise refusal(node)
        return state, b.micro[left], b.micro[right]
    if state.dim == contracted[first]:
        part = b.part(other, replace(state, dim=contracted[other]), node)
        result = PARTIAL
    elif ndim[first] == 3 and state.dim == 0:
        part = b.part(other, state, node)
        result = state
    else:
        part = b.same(other, node)
        result = replace(state, dim=_kept_dim(first is left, state.dim, ndim[left], ndim[right]))
    micro = {first: b.micro[first], other: part}
    return result, micro[left], micro[right]


def _kept_dim(in_left: bool, dim: int, left: int, right: int) -> int:
    """Where a dimension of a factor is in the product."""
    if in_left:
        return dim
    return dim if left == right else dim - 1


def per_matrix(b: LossBuilder, node: fx.Node) -> Result:
    """Operations on each matrix (the last two dimensions) by itself, operands with equal dimensions in front."""
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    states = {b.state(n) for n in tensors if not b.is_constant(n) and b.state(n).kind is not StateKind.REPLICATED}
    if len(states) != 1:
        raise refusal(node)
    state = states.pop()
    ndim = len(shape(tensors[0]))
    if not state.is_split or state.dim >= ndim - 2 or any(len(shape(n)) != ndim for n in tensors):
        raise refusal(node)
    micro = {n: b.part(n, state, node) for n in tensors}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: micro[n])
    return b.emit(node.target, *args, **kwargs), state  # type: ignore[arg-type]


def embedding(b: LossBuilder, node: fx.Node) -> Result:
    """Rows of a table that is the same for all, looked up by split indices."""
    given = arguments(node)
    indices: fx.Node = given["indices"]
    if b.is_constant(indices) or not b.state(indices).is_split or name(node) != "embedding.default":
        raise refusal(node)
    return b.emit(aten.embedding.default, b.same(given["weight"], node), b.micro[indices]), b.state(indices)


PRODUCT_RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm.default", "bmm.default", "mv.default", "dot.default"), product),
    **dict.fromkeys(("addmm.default", "baddbmm.default", "addmv.default"), product_and_sum),
    **dict.fromkeys(
        ("_cdist_forward.default", "_linalg_slogdet.default", "_linalg_det.default", "linalg_inv_ex.default",
         "_linalg_solve_ex.default", "linalg_cholesky_ex.default", "tril.default", "triu.default"),
        per_matrix,
    ),
    "embedding.default": embedding,
}  # fmt: skip
