"""Hooks on transformers' Trainer: it asks by process number whether to write and to print, we answer by rank.

Questions about `local_process_index` need no hook: that is a rank's own number, so 0 means one rank of each host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pfeife_accelerate import session


def is_world_process_zero(original: Callable[[Any], bool], trainer: Any) -> bool:
    """Hook of `Trainer.is_world_process_zero`: true on one rank of the launch."""
    return original(trainer) and _is_main()


def save_model(
    original: Callable[..., None], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Hook of `Trainer.save_model`: what all ranks write as a checkpoint is there when they go on and look for it.

    The Trainer waits for that itself where it knows of several processes. A script's own call may be on one rank.
    """
    original(trainer, output_dir, _internal_call)
    running = session.current()
    if _internal_call and running is not None:
        running.barrier()


def should_save(original: Callable[[Any], bool], arguments: Any) -> bool:
    """Hook of `TrainingArguments.should_save`: one rank writes (one of each host with `save_on_each_node`)."""
    return original(arguments) and (arguments.save_on_each_node or _is_main())


def should_log(original: Callable[[Any], bool], arguments: Any) -> bool:
    """Hook of `TrainingArguments.should_log`: one rank prints (one of each host with `log_on_each_node`)."""
    return original(arguments) and (arguments.log_on_each_node or _is_main())


def _is_main() -> bool:
    place = session.place()
    return place is None or place.is_main
