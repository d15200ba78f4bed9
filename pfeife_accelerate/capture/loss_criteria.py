"""Rules for ATen's own losses: their means become the micro-batch's share of the whole batch's mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import (
    LossBuilder,
    Result,
    Rule,
    arguments,
    name,
    refusal,
    shape,
    source_of,
    words,
)
from pfeife_accelerate.capture.loss_pointwise import Alignment
from pfeife_accelerate.capture.loss_states import PARTIAL, REPLICATED

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2  # ATen's reduction codes


def nll(b: LossBuilder, node: fx.Node) -> Result:
    """A mean is a sum over the weight of all valid targets of the whole batch. Only the first result is provided."""
    source, state = source_of(b, node)
    given = arguments(node)
    target, weight, ignore_index = given["target"], given["weight"], given["ignore_index"]
    if not state.is_split or state.dim != 0 or len(shape(source)) == 1:
        raise refusal(node)
    if not b.is_constant(target) or (weight is not None and not b.is_constant(weight)):
        raise refusal(node)
    op = aten.nll_loss2d_forward.default if "2d" in name(node) else aten.nll_loss_forward.default
    micro_weight = None if weight is None else b.whole(weight)
    operands = (b.micro[source], b.cut(target, state), micro_weight, ignore_index)
    if given["reduction"] == _NONE:
        b.pieces[node] = [(b.emit(_nll, op, *operands, _NONE), state)]
        return b.pieces[node][0]
    loss = b.emit(_nll, op, *operands, _SUM)
    if given["reduction"] == _MEAN:
        denominator = b.emit_constant(_valid_weight, target, weight, ignore_index, source.meta["val"].dtype)
        loss = b.emit(_nll_share, op, *operands, b.whole(denominator))
    b.pieces[node] = [(loss, PARTIAL)]
    return b.pieces[node][0]


def _nll(
    op: Callable[..., Any],
    source: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: int,
) -> torch.Tensor:
    loss: torch.Tensor = op(source, target, weight, reduction, ignore_index)[0]
    return loss


def _nll_share(
    op: Callable[..., Any],
    source: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    denominator: torch.Tensor,
) -> torch.Tensor:
    """The micro-batch's sum over the whole batch's weight; a sum in float16 could overflow where the mean does not."""
    precise = torch.float32 if source.dtype is torch.float16 else source.dtype
    weight = None if weight is None else weight.to(precise)
    loss = _nll(op, source.to(precise), target, weight, ignore_index, _SUM)
    return (loss / denominator).to(source.dtype)


def _valid_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum of the class weights of all targets that are not ignored; never in half precision, which cannot count."""
    precise = torch.float64 if dtype is torch.float64 else torch.float32
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(precise)
    return (weight.to(precise)[target.clamp(min=0, max=weight.numel() - 1)] * valid).sum()


def elementwise_loss(b: LossBuilder, node: fx.Node) -> Result:
    """`mse_loss`, `huber_loss`, `binary_cross_entropy...`: reduced over the micro-batch, weighted by its part."""
    given = arguments(node)
    if all(b.state(n) == REPLICATED for n in node.all_input_nodes if not b.is_constant(n)):
        raise refusal(node)
    broadcast = torch.broadcast_shapes(*(shape(given[key]) for key in ("self", "target")))
    aligned = Alignment(b, node, broadcast)
    reduction = given.pop("reduction")
    operands = {key: aligned.operand(value) if isinstance(value, fx.Node) else value for key, value in given.items()}
    if reduction == _NONE:
        return b.emit(_loss_share, node.target, operands, _NONE, 1.0), aligned.state
    fraction = b.fraction(aligned.state.window)
    return b.emit(_loss_share, node.target, operands, reduction, fraction), PARTIAL


def _loss_share(op: Callable[..., Any], operands: dict[str, Any], reduction: int, fraction: float) -> torch.Tensor:
    """The micro-batch's contribution to a loss over the whole batch."""
    if reduction == _MEAN and fraction > 0:
        return _first(op(**operands, reduction=_MEAN)) * fraction
    return _first(op(**operands, reduction=_NONE if reduction == _NONE else _SUM))


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


def per_sample(b: LossBuilder, node: fx.Node) -> Result:
    """Losses of class scores, one value a row."""
    source, state = source_of(b, node)
    given = arguments(node)
    if not state.is_split or state.dim != 0 or len(shape(source)) != 2:
        raise refusal(node)
    reduction, target = given.pop("reduction"), given.pop("target")
    others = {key: b.same(n, node) if isinstance(n, fx.Node) else n for key, n in given.items() if key != "self"}
    operands = {"self": b.micro[source], "target": b.part(target, state, node), **others}
    if reduction == _NONE:
        micro, result = b.emit(_loss_share, node.target, operands, _NONE, 1.0), state
    else:
        micro, result = b.emit(_loss_share, node.target, operands, reduction, b.fraction(state.window)), PARTIAL
    if "forward" in name(node):
        b.pieces[node] = [(micro, result)]
    return micro, result


CRITERION_RULES: dict[str, Rule] = {
    **dict.fromkeys(("nll_loss_forward.default", "nll_loss2d_forward.default"), nll),
    **dict.fromkeys(
        words("""mse_loss.default huber_loss.default smooth_l1_loss.default binary_cross_entropy.default
        binary_cross_entropy_with_logits.default soft_margin_loss.default"""),
        elementwise_loss,
    ),
    **dict.fromkeys(("multi_margin_loss.default", "multilabel_margin_loss_forward.default"), per_sample),
}
