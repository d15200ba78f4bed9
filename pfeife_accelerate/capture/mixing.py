"""Operations that combine rows of the batch and keep the batch's dimension in their result.

An operation that sums over the batch shows by the missing dimension. These do not: attention between the rows, a
running sum over them, a product of all rows with all rows. Micro-batches would silently give something else. Models:
operations by name and by the dimension they work along. Ignores: indexing by tensors, and BatchNorm, which is exempt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.nodes import target_name, tensors_in

BatchDim = Callable[[torch.Tensor], int | None]

_DIM_ARGUMENT = {
    "softmax": 1,
    "softmin": 1,
    "log_softmax": 1,
    "gumbel_softmax": 4,
    "cumsum": 1,
    "cumprod": 1,
    "cummax": 1,
    "cummin": 1,
    "logcumsumexp": 1,
    "flip": 1,
    "sort": 1,
    "argsort": 1,
    "topk": 2,
    "roll": 2,
    "normalize": 2,
}
"""Where operations that work along a dimension are given it."""
_ALONG_FIRST = ("msort", "flipud")
_TRIANGLES = ("tril", "triu")
_FOURIER = re.compile(r"^fft_(i?[rh]?fft[2n]?|i?fftshift)$")
_ALONG_PLACES = ("conv", "max_pool", "avg_pool", "adaptive_", "interpolate")


def mixes_rows(node: fx.Node, batch_dim: BatchDim, num_batch_dims: Callable[[torch.Tensor], int]) -> bool:
    """Whether the operation's result in some row depends on other rows, though it has a dimension for the rows."""
    if any(num_batch_dims(value) > 1 for value in tensors_in(node.meta.get("example_value"))):
        return True  # every row with every row
    name = target_name(node)
    if name in ("cat", "concat", "concatenate"):
        return _joins_batches(node, batch_dim)
    operands = [arg.meta.get("example_value") for arg in node.args if isinstance(arg, fx.Node)]
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    if not tensors or (along := batch_dim(tensors[0])) is None:
        return False
    first = tensors[0]
    if name == "scaled_dot_product_attention":
        return along >= first.dim() - 2
    if name == "multi_head_attention_forward":  # takes (length, batch, width)
        return first.dim() != 3 or along != 1
    if name == "layer_norm":
        shape = node.kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else ())
        return along >= first.dim() - len(tuple(shape))  # type: ignore[arg-type]
    if name.startswith(_ALONG_PLACES):
        return along != 0
    if name in _ALONG_FIRST:
        return along == 0
    if name in _TRIANGLES:
        return along >= first.dim() - 2
    if _FOURIER.match(name):
        return along in _fourier_dims(node, name, first.dim())
    if name == "roll":  # without a dimension, all elements one after the other
        return along in _dims(node, _DIM_ARGUMENT[name], first.dim(), default=range(first.dim()))
    if name == "flip" and isinstance(node.args[-1], int):
        return along in {dim % first.dim() for dim in node.args[1:] if isinstance(dim, int)}
    if name in _DIM_ARGUMENT:
        return along in _dims(node, _DIM_ARGUMENT[name], first.dim())
    return False


def _joins_batches(node: fx.Node, batch_dim: BatchDim) -> bool:
    tensors = node.args[0] if node.args else node.kwargs.get("tensors", ())
    if not isinstance(tensors, tuple | list):
        return False
    values = [t.meta.get("example_value") for t in tensors if isinstance(t, fx.Node)]
    return any(
        isinstance(value, torch.Tensor) and batch_dim(value) in _dims(node, 1, value.dim(), default=0)
        for value in values
    )


def _fourier_dims(node: fx.Node, name: str, number: int) -> list[int]:
    if name.endswith("shift"):
        return _dims(node, 1, number, default=range(number))
    of_name: dict[str, int | Sequence[int]] = {"2": (-2, -1), "n": range(number)}
    return _dims(node, 2, number, default=of_name.get(name[-1], -1))


def _dims(node: fx.Node, position: int, number: int, default: int | Sequence[int] = -1) -> list[int]:
    """The dimensions that the operation is given, counted from the front."""
    named: Any = node.kwargs.get("dim", node.kwargs.get("dims"))
    given = named if named is not None else (node.args[position] if len(node.args) > position else None)
    given = default if given is None else given
    dims = given if isinstance(given, tuple | list | range) else (given,)
    return [dim % number for dim in dims if isinstance(dim, int) and number]
