"""Hooks on Accelerate's training calls: preparing models, `backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pfeife_accelerate import session
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.integration.alignment import align_generators, align_states
from pfeife_accelerate.integration.facade import pipelined
from pfeife_accelerate.session.call import refuse_second_backward
from pfeife_accelerate.session.compilation import compilation_of

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
    running = session.current()
    if running is None or evaluation_mode:
        return original(accelerator, model, device_placement, evaluation_mode)
    models = accelerator._models
    if any(model is known for known in models):
        return model
    precision = accelerator.mixed_precision
    if precision not in ("no", *_DTYPES):
        raise PfeifeError(
            id="PF512",
            what=f"mixed_precision={precision!r} is not supported on a pipelined model",
            hints=("mixed_precision: no, bf16 or fp16",),
        )
    device = accelerator.device
    if device.type == "cpu":
        device = torch.device("cpu")  # accelerate says cpu:0 where it counts processes, tensors say cpu
    autocast = (device.type, _DTYPES[precision]) if precision in _DTYPES else None
    running.compilation = compilation_of(running.plugin, accelerator.state.dynamo_plugin)
    align_states(model)
    models.append(model)
    return pipelined(model, device, autocast)


def backward(original: Callable[..., None], accelerator: Any, loss: Any, **kwargs: Any) -> None:
    """Hook of `Accelerator.backward`, which divides the loss first: a used one would then be a plain number."""
    refuse_second_backward(loss)
    original(accelerator, loss, **kwargs)
