"""Rules for reductions, and for operations along one dimension that keep it (softmax, cumsum, sort)."""

from __future__ import annotations

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
    words,
)
from pfeife_accelerate.capture.loss_states import PARTIAL, REPLICATED, State, StateKind

aten = torch.ops.aten


def without_dims(state: State, dims: tuple[int, ...], keepdim: bool = False) -> State:
    """The state after dimensions other than the batch's have been dropped (or kept with size one)."""
    gone = 0 if keepdim else sum(d < state.dim for d in dims)
    return replace(state, dim=state.dim - gone)


def sum_or_mean(b: LossBuilder, node: fx.Node) -> Result:
    """Sums over the batch become partial; means, means over the micro-batch weighted by its part of the batch."""
    source, state = source_of(b, node)
    given = arguments(node)
    dims = dims_of(given.get("dim"), len(shape(source)))
    keepdim = given.get("keepdim", False)
    match state.kind:
        case StateKind.PARTIAL:
            return emit_same(b, node, PARTIAL)
        case StateKind.REPLICATED:
            return emit_same(b, node, REPLICATED)
        case StateKind.SPLIT if state.dim not in dims:
            return emit_same(b, node, without_dims(state, dims, keepdim))
    if name(node).startswith("mean"):
        fraction = b.fraction(state.window)
        return b.emit(mean_share, b.micro[source], list(dims), keepdim, given.get("dtype"), fraction), PARTIAL
    return b.emit(aten.sum.dim_IntList, b.micro[source], list(dims), keepdim, dtype=given.get("dtype")), PARTIAL


def mean_share(
    value: torch.Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None, fraction: float
) -> torch.Tensor:
    """The micro-batch's contribution to a mean over the whole batch.

    Not a sum divided by the whole count: in half precision the sum may overflow where the mean does not.
    """
    if fraction == 0:
        return torch.sum(value, dims, keepdim, dtype=dtype)
    return torch.mean(value, dims, keepdim, dtype=dtype) * fraction


def within_items(b: LossBuilder, node: fx.Node) -> Result:
    """Other reductions (max, norm, variance, logsumexp): fine within an item, refused over the batch."""
    source, state = source_of(b, node)
    given = arguments(node)
    dims = dims_of(given.get("dim"), len(shape(source)))
    if state == PARTIAL or (state.is_split and state.dim in dims):
        raise refusal(node)
    return emit_same(b, node, without_dims(state, dims, bool(given.get("keepdim", False))) if state.is_split else state)


def along_dim(b: LossBuilder, node: fx.Node) -> Result:
    """Operations along one dimension that keep the number of dimensions: refused along the batch."""
    source, state = source_of(b, node)
    given: dict[str, Any] = arguments(node)
    dims = dims_of(given["dim"], len(shape(source)))
    if state == PARTIAL or (state.is_split and state.dim in dims):
        raise refusal(node)
    return emit_same(b, node, state)


REDUCTION_RULES: dict[str, Rule] = {
    **dict.fromkeys(("sum.default", "sum.dim_IntList", "mean.default", "mean.dim"), sum_or_mean),
    **dict.fromkeys(
        words("""amax.default amin.default max.dim min.dim max.default min.default var.correction std.correction
        var_mean.correction prod.default prod.dim_int logsumexp.default linalg_vector_norm.default norm.ScalarOpt_dim
        norm.Scalar kthvalue.default mode.default nanmedian.dim nansum.default argmax.default argmin.default
        all.default all.dim all.dims any.default any.dim any.dims median.dim"""),
        within_items,
    ),
    **dict.fromkeys(
        words("""_softmax.default _log_softmax.default cumsum.default cumprod.default logcumsumexp.default
        cummax.default cummin.default sort.default sort.stable topk.default glu.default"""),
        along_dim,
    ),
}
