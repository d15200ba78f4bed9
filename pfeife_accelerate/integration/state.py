"""Hooks on Accelerate's saving calls: what is saved is the whole model, written once.

Models: `save_model`, which looks at the parameters themselves and not only at the state dict; `save_state`, whose files
are named by process number; hooks on saving, of which the main process alone may run a part.
Ignores: `get_state_dict`, `unwrap_model(...).state_dict()` and `save_pretrained`, which need no hook
(see `session.whole`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from pfeife_accelerate import session
from pfeife_accelerate.integration.alignment import kept_generators
from pfeife_accelerate.session.whole import whole_module


def prepare_optimizer(
    original: Callable[..., Any], accelerator: Any, optimizer: Any, device_placement: bool | None = None
) -> Any:
    """Hook of `Accelerator.prepare_optimizer`: its state dict will be whole."""
    prepared = original(accelerator, optimizer, device_placement)
    running = session.current()
    if running is not None:
        running.optimizers.add(prepared.optimizer)
    return prepared


def save_accelerator_state(original: Callable[..., Any], output_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of the function behind `save_state`: one rank of each pipeline writes, as one process would."""
    place = session.place()
    if place is not None and place.rank != 0:
        return output_dir
    return original(output_dir, *args, **kwargs)


def register_save_state_pre_hook(original: Callable[..., Any], accelerator: Any, hook: Callable[..., None]) -> Any:
    """Hook of `Accelerator.register_save_state_pre_hook`: saving draws no random numbers from the script's generators.

    A script's hook makes models to save on the main process alone (a moving average's), and to make them draws numbers.
    """

    @functools.wraps(hook)
    def keeping(*args: Any, **kwargs: Any) -> None:
        if session.current() is None:
            hook(*args, **kwargs)
            return
        with kept_generators():
            hook(*args, **kwargs)

    return original(accelerator, keeping)


def save_model(original: Callable[..., Any], accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Hook of `Accelerator.save_model`: the ranks that write see the whole model; the others have nothing to do."""
    running = session.current()
    pipelined = None if running is None else running.model_of(model)
    if pipelined is None:
        return original(accelerator, model, *args, **kwargs)
    if not (accelerator.is_main_process or accelerator.is_local_main_process):
        return None
    with whole_module(pipelined):
        return original(accelerator, model, *args, **kwargs)
