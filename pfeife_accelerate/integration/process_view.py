"""A pipeline is one process to the script.

Models: `num_processes` is the number of pipelines, `process_index` the pipeline's index, torch's default process group
joins the same position of all pipelines; one rank of all speaks for the script; waiting is for all ranks.
Ignores: `local_process_index` and `device`, which stay those of the rank: they choose its hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType

from pfeife_accelerate import session
from pfeife_accelerate.compat import process_state_is_made, update_process_state
from pfeife_accelerate.config import PfeifePlugin, default_variable, flag, is_enabled, process_variable
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.log import get_logger, warn_once

__all__ = [
    "barrier",
    "destroy_process_group",
    "enter_if_made",
    "is_last_process",
    "is_main_process",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "partial_state_init",
    "torch_destroy_process_group",
    "wait_for_everyone",
]

_LOGGER = get_logger(__name__)
_Function = TypeVar("_Function", bound="Callable[..., Any] | None")


def partial_state_init(original: Callable[..., None], state: Any, cpu: bool = False, **kwargs: Any) -> None:
    """Hook of `PartialState.__init__`: after a real initialisation, show pipelines instead of ranks."""
    if process_state_is_made() or not is_enabled():
        original(state, cpu, **kwargs)
        return
    plugin = PfeifePlugin.from_environment()
    if not cpu and _runs_on_cpu():
        # Without this, accelerate takes launched processes without accelerators for independent ones.
        default_variable("ACCELERATE_USE_CPU", "true")
        cpu = True
    if cpu and process_variable("OMP_NUM_THREADS") is None and process_variable("LOCAL_RANK") is not None:
        default_variable("OMP_NUM_THREADS", str(torch.get_num_threads()))
    original(state, cpu, **kwargs)
    _enter(state.distributed_type, state.device, plugin)


def enter_if_made() -> None:
    """Change the view of a state that was made before the options were known."""
    if process_state_is_made():
        from accelerate.state import PartialState

        state = PartialState()
        _enter(state.distributed_type, state.device, PfeifePlugin.from_environment())


def is_main_process(original: Callable[[Any], bool], state: Any) -> bool:
    """True on one rank of the launch."""
    place = session.place()
    return original(state) if place is None else place.is_main


def is_last_process(original: Callable[[Any], bool], state: Any) -> bool:
    """True on one rank of the last pipeline; with one pipeline that is the main process, as in a single process."""
    place = session.place()
    return original(state) if place is None else place.is_last


def wait_for_everyone(original: Callable[[Any], None], state: Any) -> None:
    """Wait for all ranks of all pipelines."""
    running = session.current()
    if running is not None:
        running.barrier()
    elif session.place() is None:
        original(state)


def barrier(original: Callable[..., Any], group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any) -> Any:
    """Hook of `torch.distributed.barrier`: a script that calls it without a group means everyone."""
    running = session.current()
    is_plain = not args and not any(kwargs.get(name) for name in ("async_op", "timeout"))
    if running is None or not is_plain or (group is not None and group is not dist.group.WORLD):
        return original(group, *args, **kwargs)
    return original(running.mesh.world_control_group)


def on_main_process(original: Callable[..., Any], state: Any, function: _Function = None) -> Any:  # type: ignore[assignment]
    """Run on the one main rank."""
    if session.place() is None:
        return original(state, function)
    return function if state.is_main_process else _do_nothing


def on_local_main_process(original: Callable[..., Any], state: Any, function: _Function = None) -> Any:  # type: ignore[assignment]
    """Run on one rank of each host."""
    if session.place() is None:
        return original(state, function)
    return function if state.is_local_main_process else _do_nothing


def on_last_process(original: Callable[..., Any], state: Any, function: Callable[..., Any]) -> Any:
    """Run on one rank of the last pipeline."""
    if session.place() is None:
        return original(state, function)
    return function if state.is_last_process else _do_nothing


def on_process(
    original: Callable[..., Any],
    state: Any,
    function: Callable[..., Any] | None = None,
    process_index: int | None = None,
) -> Any:
    """Run on one rank of pipeline `process_index`; with one pipeline always, as in a single process."""
    place = session.place()
    if place is None or function is None:
        return original(state, function, process_index)
    is_meant = place.num_pipelines == 1 or place.pipeline_index == process_index
    return function if is_meant and place.rank == 0 else _do_nothing


def on_local_process(
    original: Callable[..., Any],
    state: Any,
    function: Callable[..., Any] | None = None,
    local_process_index: int | None = None,
) -> Any:
    """Run on one rank of each host: the one with that local index."""
    if session.place() is None or function is None:
        return original(state, function, local_process_index)
    return function if state.local_process_index == local_process_index else _do_nothing


def destroy_process_group(original: Callable[..., None], state: Any, group: dist.ProcessGroup | None = None) -> None:
    """Hook of `PartialState.destroy_process_group`, which `end_training` calls: leave together."""
    if group is None and session.current() is not None:
        session.stop()
        return
    original(state, group)


def torch_destroy_process_group(original: Callable[..., None], group: dist.ProcessGroup | None = None) -> None:
    """Hook of `torch.distributed.destroy_process_group`: ending all groups ends the session first."""
    is_all = group is None or group is dist.group.WORLD
    if is_all and session.current() is not None:
        session.stop()
        return
    original(group)


def _runs_on_cpu() -> bool:
    """Whether this launched process has nothing but the CPU that accelerate could use with other processes."""
    if process_variable("LOCAL_RANK") is None:
        return False
    if flag("ACCELERATE_USE_CPU"):
        return True
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is None or device.type == "mps"


def _enter(distributed_type: DistributedType, device: torch.device, plugin: PfeifePlugin) -> None:
    if not dist.is_initialized():
        _refuse_or_warn_single_process(plugin)
        return
    if not str(distributed_type.value).startswith(("MULTI_", "NO")):
        raise PfeifeError(
            id="PF123",
            what=f"pipelines cannot be combined with {distributed_type.value}",
            where="distributed_type",
            hints=("distributed_type: MULTI_GPU or MULTI_CPU", "remove the pfeife_config section"),
        )
    place = session.start(plugin, torch.device("cpu") if device.type == "cpu" else device).mesh.shape
    facts: dict[str, Any] = {"num_processes": place.num_pipelines, "process_index": place.pipeline_index}
    if place.num_pipelines == 1:
        facts["distributed_type"] = DistributedType.NO
        if device.type == "cpu":
            # Accelerate calls it cpu:0 when it counts processes, and cpu, which is not equal, when there is one.
            facts["device"] = torch.device("cpu")
    update_process_state(facts)


def _refuse_or_warn_single_process(plugin: PfeifePlugin) -> None:
    if plugin.pipeline_size not in (None, 1):
        session.validate_world(world_size=1, pipeline_size=plugin.pipeline_size)
    warn_once(
        _LOGGER,
        "single process",
        "a pipeline is configured but this script runs in a single process; it trains without one. "
        "Start it by: accelerate launch --config pfeife.yaml",
    )


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """What the other ranks run."""
