"""The launcher's side: `--config`, the yaml section, and local CPU processes that really start.

Models: hooks on accelerate's command line; the section is checked before any process starts and travels by environment.
Ignores: configurations without the section, which go through unchanged.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Final, NoReturn

from pfeife_accelerate.config import (
    SECTION,
    PfeifePlugin,
    default_variable,
    export,
    flag,
    is_enabled,
    overlay,
    process_variable,
)
from pfeife_accelerate.errors import PfeifeError

__all__ = ["add_argument", "prepare_ranks_env", "prepare_single_process", "process_config", "with_large_pages"]

_REFUSED: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def add_argument(original: Callable[..., None], parser: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of accelerate's argument parsers: `--config` is `--config_file` in `accelerate launch`."""
    # One parser is called "accelerate <command> [<args>] launch", the other "Accelerate launch command".
    if args == ("--config_file",) and "launch" in parser.prog:
        args = ("--config_file", "--config")
    original(parser, *args, **kwargs)


def process_config(original: Callable[..., dict[str, Any]], config_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook of `BaseConfig.process_config`: take our section out, check it, hand it to the children."""
    if SECTION not in config_dict:
        return original(config_dict)
    section = config_dict.pop(SECTION)
    try:
        plugin = PfeifePlugin.from_mapping(section)
        lower_environment = PfeifePlugin.from_environment()
        _refuse_other_engines(config_dict)
        _use_elastic_launcher_on_cpu(config_dict)
    except PfeifeError as error:
        _exit(error)
    export(overlay(lower_environment, plugin))
    return original(config_dict)


def prepare_ranks_env(original: Callable[..., dict[str, str]], args: Namespace) -> dict[str, str]:
    """Hook of `prepare_multi_gpu_env`: last checks before processes start; threads and large pages for CPU ranks."""
    if not is_enabled():
        return original(args)
    try:
        plugin = PfeifePlugin.from_environment()
        _refuse_indivisible(args, plugin)
    except PfeifeError as error:
        _exit(error)
    env = original(args)
    if flag("ACCELERATE_USE_CPU"):
        if process_variable("OMP_NUM_THREADS") is None:
            env["OMP_NUM_THREADS"] = str(_threads_per_process(args))
        env["GLIBC_TUNABLES"] = with_large_pages(process_variable("GLIBC_TUNABLES"))
    return env


def prepare_single_process(original: Callable[..., Any], args: Namespace) -> Any:
    """Hook of `prepare_simple_launcher_cmd_env`: refuse to start one process where a pipeline needs several."""
    if is_enabled() and args.mpirun_hostfile is None:
        try:
            plugin = PfeifePlugin.from_environment()
            wants_several = (args.num_processes or 1) > 1 or plugin.pipeline_size not in (None, 1)
            if wants_several:
                raise _single_process(args)
        except PfeifeError as error:
            _exit(error)
    return original(args)


def _refuse_other_engines(config_dict: dict[str, Any]) -> None:
    engine = str(config_dict.get("distributed_type", "")).rpartition(".")[2]
    if engine in _REFUSED:
        raise PfeifeError(
            id="PF123",
            what=f"pipelines cannot be combined with {engine}",
            where="distributed_type",
            hints=("distributed_type: MULTI_GPU or MULTI_CPU", f"remove the {SECTION} section"),
        )


def _use_elastic_launcher_on_cpu(config_dict: dict[str, Any]) -> None:
    """Start CPU ranks by the launcher of GPU ranks: accelerate itself would start a single process."""
    engine = str(config_dict.get("distributed_type", "")).rpartition(".")[2]
    num_processes = config_dict.get("num_processes") or 1
    is_local_cpu = engine == "MULTI_CPU" or (
        config_dict.get("use_cpu") and (engine == "MULTI_GPU" or num_processes > 1)
    )
    if not is_local_cpu or config_dict.get("mpirun_config"):
        return
    config_dict["distributed_type"] = "MULTI_GPU"
    config_dict["gpu_ids"] = None
    # Left on, accelerate would count physical cores for a choice that `prepare_ranks_env` makes.
    config_dict["use_cpu"] = False
    default_variable("ACCELERATE_USE_CPU", "true")


def _refuse_indivisible(args: Namespace, plugin: PfeifePlugin) -> None:
    if plugin.pipeline_size is None or args.num_processes is None:
        return
    # Imported here: it loads torch, which most of accelerate's commands do not need.
    from pfeife_accelerate.session import validate_world

    validate_world(world_size=int(args.num_processes), pipeline_size=plugin.pipeline_size)


def with_large_pages(tunables: str | None) -> str:
    """Glibc's tunables, with large pages for tensors in host memory unless they say themselves.

    A step walks through gigabytes; in pages of 4 KiB, misses of the processor's page cache cost some per cent of it. It
    takes effect where the kernel leaves the choice to programs (`madvise`). Other C libraries ignore the variable.
    """
    others = [tunable for tunable in (tunables or "").split(":") if tunable]
    if any(tunable.startswith("glibc.malloc.hugetlb=") for tunable in others):
        return ":".join(others)
    return ":".join([*others, "glibc.malloc.hugetlb=1"])


def _threads_per_process(args: Namespace) -> int:
    if "num_cpu_threads_per_process" in vars(args).get("nondefault", ()):
        return int(args.num_cpu_threads_per_process)
    local_processes = max(1, int(args.num_processes) // max(1, int(args.num_machines or 1)))
    return max(1, (os.cpu_count() or 1) // local_processes)


def _single_process(args: Namespace) -> PfeifeError:
    hints = [
        f"distributed_type: MULTI_CPU\nnum_processes: {max(2, args.num_processes or 1)}",
        "distributed_type: MULTI_GPU, or --multi_gpu",
    ]
    if args.cpu:
        hints.insert(0, "leave out --cpu and say distributed_type: MULTI_CPU in the configuration")
    return PfeifeError(
        id="PF103",
        what="a pipeline is configured, but accelerate would start a single process",
        where="accelerate launch",
        why="distributed_type: NO, or --cpu, starts the script once whatever num_processes says",
        hints=hints,
    )


def _exit(error: PfeifeError) -> NoReturn:
    """End the launcher with the error alone: a traceback through argparse would bury it."""
    sys.stderr.write(f"{error}\n")
    raise SystemExit(2) from None
