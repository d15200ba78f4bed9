"""Linear layers that add their weight's gradient to that of earlier micro-batches within the matrix product itself.

Autograd computes a micro-batch's gradient of a weight into new memory and adds it to `.grad` after that: for a
micro-batch of few rows, writing and reading it costs as much as a part of the product. (The technique is Megatron-LM's
`gradient_accumulation_fusion`.)

Models: `torch.nn.functional.linear` with a parameter as its weight; the first micro-batch's gradient, and any gradient
that autograd would not just add (with hooks, under autocast, for `torch.autograd.grad`), goes autograd's way.
Ignores: other products: torch has no convolution that adds.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from pfeife_accelerate.compat import has_gradient_hooks, is_accumulated

__all__ = ["accumulating_linear", "add_product", "is_plain_leaf"]

_WORTHWHILE_BYTES: Final = 1 << 16  #: of a weight; of a smaller one, the gradient is still in a cache when it is added


def is_plain_leaf(weight: torch.Tensor) -> bool:
    """Whether a gradient can be added to the weight's `.grad` without anybody's noticing when."""
    is_leaf = weight.requires_grad and weight.is_leaf
    return is_leaf and type(weight) in (torch.nn.Parameter, torch.Tensor) and not has_gradient_hooks(weight)


def accumulating_linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, with another backward where that pays and nobody can notice."""
    if (
        _is_worthwhile(weight)
        and torch.is_grad_enabled()
        and is_plain_leaf(weight)
        and not weight.is_complex()
        and not torch.is_autocast_enabled(weight.device.type)
    ):
        return _Linear.apply(value, weight, bias)  # type: ignore[no-any-return]
    return F.linear(value, weight, bias)


def add_product(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Adds the product of two matrices to the weight's gradient; or, where that is not possible, returns it."""
    total = weight.grad
    if total is None or not _is_worthwhile(weight) or not _is_alike(total, left):
        return left.mm(right)
    total.addmm_(left, right)
    return None


def _is_alike(total: torch.Tensor, factor: torch.Tensor) -> bool:
    is_plain = total.layout == torch.strided and not total.requires_grad
    return is_plain and (total.dtype, total.device) == (factor.dtype, factor.device)


def _is_worthwhile(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.nbytes >= _WORTHWHILE_BYTES


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.parameter = weight  # what was saved may come back as another tensor, without its `.grad`
        return F.linear(value, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_value = rows.mm(weight).view(value.shape) if ctx.needs_input_grad[0] else None
        of_weight, factors = None, (rows.t(), value.reshape(-1, value.shape[-1]))
        match is_accumulated(ctx.next_functions[1][0]):
            case True:
                of_weight = add_product(ctx.parameter, *factors)
            case None:
                of_weight = factors[0].mm(factors[1])
        return of_value, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
