"""A modelled device put right by a few measurements on the real one.

Models: one factor for products of each element type, one for moving memory, one for the least time of an operation;
each the median over the measured operations that it bounds, so that a single odd kernel has no say.
Ignores: shapes (a factor is the same for small and large products), and the backward: the same kernels run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pfeife_accelerate.cost.roofline import flops, is_view, moved_bytes
from pfeife_accelerate.ir import CostOrigin, DeviceSpec, OpCost
from pfeife_accelerate.ir.costs import MeasurableOp

__all__ = ["calibrated"]

_ROUNDS = 3  # which of the three bounds an operation may change with the factors


def calibrated(spec: DeviceSpec, measured: Sequence[tuple[MeasurableOp | None, OpCost]]) -> DeviceSpec:
    """`spec` with rates at which the roofline gives the measured forwards; what nothing measured bounds is left.

    Modelled costs among `measured` are passed over, and so are views, which run no kernel. An element type that no
    measured product has takes the factor of those that have one.
    """
    known = [
        (op, cost.forward_s)
        for op, cost in measured
        if op is not None
        and cost.origin is CostOrigin.MEASURED
        and cost.forward_s > 0
        and op.writes
        and not is_view(op)
    ]
    for _ in range(_ROUNDS):
        spec = _scaled(spec, known)
    return spec


def _scaled(spec: DeviceSpec, known: Sequence[tuple[MeasurableOp, float]]) -> DeviceSpec:
    products: dict[str, list[float]] = {}
    moves: list[float] = []
    launches: list[float] = []
    for op, seconds in known:
        dtype = op.writes[0].spec.dtype
        computing_s, moving_s = flops(op) / spec.flops_per_s_of(dtype), moved_bytes(op) / spec.bytes_per_s
        rest_s = max(seconds - spec.launch_s, seconds / 10)
        if max(computing_s, moving_s) < spec.launch_s:
            launches.append(seconds / (spec.launch_s + max(computing_s, moving_s)))
        elif computing_s >= moving_s:
            products.setdefault(dtype, []).append(rest_s / computing_s)
        else:
            moves.append(rest_s / moving_s)
    every = [factor for factors in products.values() for factor in factors]
    return replace(
        spec,
        flops_per_s=tuple((dtype, rate / _median(products.get(dtype) or every)) for dtype, rate in spec.flops_per_s),
        bytes_per_s=spec.bytes_per_s / _median(moves),
        launch_s=spec.launch_s * _median(launches),
    )


def _median(factors: Sequence[float]) -> float:
    return median(factors) if factors else 1.0
