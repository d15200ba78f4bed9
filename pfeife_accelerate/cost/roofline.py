"""What an operation should cost by its size: the longer of computing and moving memory, plus one launch.

Models: multiply-adds of matrix products, convolutions and attention; every operand moved once, views not at all.
Ignores: caches, how well a kernel does for its shape, fusion, and every operation's own arithmetic beyond one
operation per element.
"""

from __future__ import annotations

from math import prod, sqrt

from pfeife_accelerate.ir import CostOrigin, DeviceSpec, OpCost
from pfeife_accelerate.ir.costs import MeasurableOp, Operand, OperandRole

__all__ = ["estimate", "flops", "is_view", "moved_bytes", "saves"]

_LOOKS_UP = frozenset({"embedding", "index_select", "gather", "getitem", "take_along_dim"})
_KEEPS_NOTHING = frozenset(
    {"add", "iadd", "add_", "sub", "isub", "sub_", "neg", "cat", "concat", "stack", "sum", "mean", "to", "float"}
)  # gradients that need no values


def estimate(op: MeasurableOp, device: DeviceSpec) -> OpCost:
    """The modelled cost of an operation on a device; `saved_bytes` is what it alone would keep."""
    work = flops(op)
    dtype = op.writes[0].spec.dtype if op.writes else "float32"
    forward_s = max(work / device.flops_per_s_of(dtype), moved_bytes(op) / device.bytes_per_s) + device.launch_s
    input_s = weight_s = 0.0
    if any(w.spec.requires_grad for w in op.writes):
        wanting = [r.role for r in op.reads if r.spec.requires_grad]
        of_values = sum(role is not OperandRole.STATE for role in wanting)
        is_product = work > 2 * sum(w.spec.numel for w in op.writes)
        # A product's gradient is one product of the same size for each factor; anything else is moved about once.
        input_s = forward_s * min(of_values, 2 if is_product else 1)
        weight_s = forward_s if OperandRole.STATE in wanting else 0.0
    storages = {o.storage: o.storage_bytes for o, kept in zip(op.reads, saves(op), strict=True) if kept}
    return OpCost(
        forward_s=forward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        saved_bytes=sum(storages.values()),
        origin=CostOrigin.MODELLED,
    )


def saves(op: MeasurableOp) -> tuple[bool, ...]:
    """For each operand read: would the backward keep it? Computed floating point values only."""
    keeps = any(w.spec.requires_grad for w in op.writes) and op.target not in _KEEPS_NOTHING and not is_view(op)
    return tuple(
        keeps and r.role is OperandRole.ACTIVATION and r.spec.dtype.startswith(("float", "bfloat", "complex"))
        for r in op.reads
    )


def flops(op: MeasurableOp) -> float:
    """Floating point operations of the forward; 0 for a view."""
    if is_view(op):
        return 0.0
    name, reads = op.target, [r.spec for r in op.reads]
    made = sum(w.spec.numel for w in op.writes)
    if name in ("linear", "matmul", "__matmul__", "bmm", "mm") and len(reads) >= 2 and reads[0].shape:
        return 2.0 * made * reads[0].shape[-1]
    if name in ("addmm", "baddbmm", "addbmm") and len(reads) >= 3 and reads[1].shape:
        return 2.0 * made * reads[1].shape[-1]
    if name.startswith("conv_transpose") and len(reads) >= 2:
        return 2.0 * reads[0].numel * prod(reads[1].shape[1:])
    if name.startswith("conv") and len(reads) >= 2 and len(reads[1].shape) > 2:
        return 2.0 * made * prod(reads[1].shape[1:])
    if name == "scaled_dot_product_attention" and len(reads) >= 3:
        return 4.0 * reads[0].numel * reads[1].shape[-2]
    if name == "einsum" and len(reads) == 2:  # exact for a product of matrices: (m*k * k*n * m*n) ** 0.5 = m*k*n
        return 2.0 * sqrt(float(reads[0].numel) * reads[1].numel * made)
    return float(made)


def moved_bytes(op: MeasurableOp) -> int:
    """Bytes read and written by the forward; 0 for a view."""
    if is_view(op):
        return 0
    written = sum(_bytes(w) for w in op.writes)
    if op.target in _LOOKS_UP:
        return 2 * written
    return written + sum(_bytes(r) for r in op.reads)


def _bytes(operand: Operand) -> int:
    return min(operand.spec.num_bytes, operand.storage_bytes)  # an expanded tensor is read from less memory


def is_view(op: MeasurableOp) -> bool:
    """Whether everything it makes lies in memory that it reads: no kernel runs."""
    read = {r.storage for r in op.reads}
    return not op.is_inplace and bool(op.writes) and all(w.storage in read for w in op.writes)
