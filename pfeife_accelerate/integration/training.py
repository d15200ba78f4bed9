"""Hooks on Accelerate's training calls: preparing models, and generators that all ranks of a pipeline share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pfeife_accelerate import session
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.integration.facade import pipelined

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of `Accelerator.prepare`: ranks of a pipeline draw the same numbers from here on."""
    running = session.current()
    if running is not None:
        align_generators()
        running.synchronises = lambda: bool(accelerator.sync_gradients)
    return original(accelerator, *args, **kwargs)


def prepare_model(
    original: Callable[..., nn.Module],
    accelerator: Any,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Hook of `Accelerator.prepare_model`: the model becomes a pipeline. Nothing is moved to a device yet."""
    if session.current() is None or evaluation_mode:
        return original(accelerator, model, device_placement, evaluation_mode)
    models = accelerator._models
    if any(model is known for known in models):
        return model
    models.append(model)
    precision = accelerator.mixed_precision
    if precision not in ("no", *_DTYPES):
        raise PfeifeError(
            id="PF512",
            what=f"mixed_precision={precision!r} is not supported on a pipelined model",
            hints=("mixed_precision: no, bf16 or fp16",),
        )
    device = accelerator.device
    autocast = (device.type, _DTYPES[precision]) if precision in _DTYPES else None
    return pipelined(model, device, autocast)


def align_generators() -> None:
    """Give all ranks of the pipeline the generator states of its first rank: torch, CUDA, numpy and random."""
    running = session.current()
    assert running is not None
    mesh = running.mesh
    words = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        words.append(torch.cuda.get_rng_state())
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    words.append(torch.from_numpy(np.asarray(keys).view(np.uint8).copy()))
    words.append(torch.tensor([position, has_gauss], dtype=torch.int64))
    words.append(torch.tensor([gauss], dtype=torch.float64))
    version, internal, next_gauss = random.getstate()
    words.append(torch.tensor(internal, dtype=torch.int64))
    words.append(torch.tensor([float("nan") if next_gauss is None else next_gauss], dtype=torch.float64))
    for word in words:
        dist.broadcast(word, group=mesh.pipeline_control_group, group_src=0)
    if mesh.rank == 0:
        return
    torch.set_rng_state(words[0])
    if len(words) == 7:
        torch.cuda.set_rng_state(words[1])
    keys_, place, gauss_, internal_, next_ = words[-5:]
    np.random.set_state((kind, keys_.numpy().view(np.uint32), int(place[0]), int(place[1]), float(gauss_)))
    pending = float(next_)
    random.setstate((version, tuple(internal_.tolist()), None if pending != pending else pending))
