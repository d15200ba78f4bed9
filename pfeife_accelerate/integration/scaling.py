"""`GradScaler` on a pipelined model's optimizer: an overflow on one stage is an overflow on all.

Models: the check for infinite gradients, which every way of using a scaler goes through (`unscale_`, `step`, fused
optimizers). Ranks that have seen different gradients come to one decision, so all skip the same steps and keep one
scale; a rank whose stages have no gradients goes along. Ignores: optimizers without a pipelined parameter, whose
gradients are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def unscale_gradients(
    original: Callable[..., dict[torch.device, torch.Tensor]],
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Hook of `GradScaler._unscale_grads_`: what it found, on whichever rank."""
    # This module is loaded together with torch; the session is not needed before there is a model.
    from pfeife_accelerate import session

    running = session.current()
    if running is None or not _is_pipelined(optimizer, running.parameters_counted_here()):
        return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    with running.only_own_gradients():
        found = original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    _count_edit([p for group in optimizer.param_groups for p in group["params"]])
    overflow = any(bool(value.item()) for value in found.values())
    seen = torch.tensor([bool(found), overflow], dtype=torch.int64)
    running.reduce(seen, dist.ReduceOp.MAX)
    if not seen[0]:
        return found  # no rank has a gradient: torch says so, as in one process
    return {found_inf.device: torch.full_like(found_inf, float(seen[1]))}


def _count_edit(parameters: list[torch.Tensor]) -> None:
    """Let a change that leaves no trace in a tensor's version be seen by whoever compares versions between ranks."""
    from pfeife_accelerate import session

    session.count_gradient_edit(parameters)
    torch.autograd.graph.increment_version([p.grad for p in parameters if not p.is_meta and p.grad is not None])


def _is_pipelined(optimizer: torch.optim.Optimizer, counted: dict[int, bool]) -> bool:
    return any(id(parameter) in counted for group in optimizer.param_groups for parameter in group["params"])
