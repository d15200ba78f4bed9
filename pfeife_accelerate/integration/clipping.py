"""`clip_grad_norm_` on a pipelined model's parameters: the norm is over all stages, a tied parameter counts once.

By value each rank clips its own gradients; that the others do the same to theirs is noted for whoever reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pfeife_accelerate.session import Session


def clip_grad_norm_(
    original: Callable[..., torch.Tensor],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Hook of `torch.nn.utils.clip_grad_norm_`."""
    # This module is loaded together with torch; the session is not needed before there is a model.
    from pfeife_accelerate import session

    everything = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    running = session.current()
    counts = {} if running is None else running.parameters_counted_here()
    if running is None or not any(id(p) in counts for p in everything):
        return original(everything, max_norm, norm_type, error_if_nonfinite, foreach)
    session.count_gradient_edit(everything)
    here = [p for p in everything if not p.is_meta]
    elsewhere = running.mesh.rank != 0  # what is no part of a pipeline is the same on every rank: rank 0 counts it
    grads = [p.grad for p in here if p.grad is not None and counts.get(id(p), not elsewhere)]
    total = _total_norm(grads, float(norm_type), running)
    own = [p for p in here if p.grad is not None]
    device = own[0].device if own else running.device
    norm = total.to(device=device, dtype=_dtype(everything))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite")
    if own:
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach)
    return norm


def _dtype(parameters: list[torch.Tensor]) -> torch.dtype:
    """That of the whole model's norm, on every rank: also where no gradient is."""
    found = {p.dtype for p in parameters if p.requires_grad and p.is_floating_point()}
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def clip_grad_value_(
    original: Callable[..., None],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Hook of `torch.nn.utils.clip_grad_value_`."""
    from pfeife_accelerate import session

    everything = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    here = [p for p in everything if not p.is_meta]
    first = next((p.grad for p in here if p.grad is not None), None)
    before = 0 if first is None else first._version
    original(here, clip_value, foreach)
    # A minimum and a maximum, where the tensors are clipped in one go.
    session.count_gradient_edit(everything, 2 if first is None else first._version - before)


def _total_norm(grads: list[torch.Tensor], norm_type: float, running: Session) -> torch.Tensor:
    local = torch.nn.utils.get_total_norm(grads, norm_type).to("cpu", torch.float64) if grads else torch.zeros(())
    is_max = norm_type == float("inf")
    power = local if is_max else local.to(torch.float64) ** norm_type
    power = power.to(torch.float64).reshape(1).clone()
    running.reduce(power, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)
    return (power if is_max else power ** (1.0 / norm_type)).reshape(())
