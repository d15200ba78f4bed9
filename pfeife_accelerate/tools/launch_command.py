"""How a tool starts a training script: by Accelerate's launcher, with a plain configuration where none is given.

Models: local processes. Ignores: what the script does.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from pfeife_accelerate.config import SECTION, PfeifePlugin, export, overlay
from pfeife_accelerate.errors import PfeifeError

__all__ = ["check_paths", "free_port", "run_script"]


def free_port() -> int:
    """A port of this host that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_paths(script: Path, config: Path | None, out: Path, *, where: str) -> None:
    """Raises: PfeifeError PF234 for files that are not there."""
    for path, what in ((script, "script"), (config, "configuration"), (out.absolute().parent, "folder")):
        if path is not None and not path.exists():
            raise PfeifeError(id="PF234", what=f"the {what} {path} does not exist", where=where)


def run_script(
    script: Path,
    arguments: Sequence[str],
    wanted: PfeifePlugin,
    config: Path | None,
    num_processes: int | None,
    folder: Path,
) -> int:
    """Run the script with these options over those of the environment; gives its exit code.

    Without a configuration, as many local processes as there are GPUs, or two. `folder` is for files that this needs.
    """
    export(overlay(wanted, PfeifePlugin.from_environment()))
    command = _launch_command(script, arguments, config, num_processes, folder)
    return subprocess.run(command, check=False).returncode


def _launch_command(
    script: Path, arguments: Sequence[str], config: Path | None, num_processes: int | None, folder: Path
) -> list[str]:
    if config is None:
        gpus = torch.cuda.device_count()
        config = folder / "config.yaml"
        plain: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if gpus else "MULTI_CPU",
            "num_machines": 1,
            "num_processes": num_processes or gpus or 2,
            "main_process_port": 0,  # any that is free
            SECTION: {},
        }
        config.write_text(yaml.safe_dump(plain), encoding="utf-8")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    if num_processes is not None:
        launch += ["--num_processes", str(num_processes)]
    return [*launch, str(script), *arguments]
