"""The description of a tensor without the tensor.

Models: shape, element type, whether a gradient flows back to it. Ignores: strides, device, values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pfeife_accelerate.errors import PfeifeError, did_you_mean

__all__ = ["TensorSpec", "dtype_bytes"]

_DTYPE_BITS = {
    "bool": 8, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "uint32": 32, "int32": 32, "uint64": 64, "int64": 64,
    "float8_e4m3fn": 8, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex32": 32, "complex64": 64, "complex128": 128,
}  # fmt: skip


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`, named as torch names it without `torch.`."""
    if dtype not in _DTYPE_BITS:
        near = did_you_mean(dtype, _DTYPE_BITS)
        raise PfeifeError(
            id="PF150", what=f"unknown element type {dtype!r}", hints=(f"did you mean {near!r}?",) if near else ()
        )
    return _DTYPE_BITS[dtype] // 8


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape, element type (`"float32"`) and whether a gradient flows back."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of a dense copy, in bytes."""
        return self.numel * dtype_bytes(self.dtype)
