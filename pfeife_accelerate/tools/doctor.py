"""`pfeife doctor`: whether this installation can run a pipeline, and what it would run with.

Models: versions, devices, patched attributes, options in force, and two real processes that exchange a tensor.
Ignores: the speed of the machine; `pfeife profile` measures that.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import pfeife_accelerate
from pfeife_accelerate.config import PfeifePlugin, is_enabled, section_variables
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.integration import seams
from pfeife_accelerate.tools.launch_command import free_port
from pfeife_accelerate.tools.tables import folding_table

__all__ = ["SelfTest", "doctor", "self_test"]

_LIBRARIES: Final = ("torch", "accelerate", "transformers", "diffusers", "timm")
_SELF_TEST_LIMIT_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """How the two processes fared; `latency_s` is half a round trip of a small tensor."""

    passed: bool
    latency_s: float | None
    message: str


def doctor(*, with_self_test: bool = True) -> int:
    """Print everything; 0 when all is well, 1 when something failed."""
    console = Console()
    failures: list[str] = []
    console.print(_versions())
    console.print(_devices())
    console.print(_seams(failures))
    console.print(_options(failures))
    if with_self_test:
        result = self_test()
        console.print(f"self-test of two processes over gloo: {result.message}", soft_wrap=True)
        if not result.passed:
            failures.append("the self-test of two processes")
    for failure in failures:
        console.print(f"[bold red]failed[/bold red]: {failure}", soft_wrap=True)
    if not failures:
        console.print("all is well")
    return 1 if failures else 0


def self_test(*, limit_s: float = _SELF_TEST_LIMIT_S) -> SelfTest:
    """Start two processes that send a tensor to and fro; never takes longer than `limit_s`."""
    command = [sys.executable, "-m", __name__, str(free_port())]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    deadline_s = time.monotonic() + limit_s
    outputs: list[str] = []
    try:
        for process in processes:
            stdout, stderr = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
            if process.returncode != 0:
                last = stderr.strip().splitlines()[-1:] or ["no message"]
                return SelfTest(passed=False, latency_s=None, message=f"exit code {process.returncode}: {last[0]}")
            outputs.append(stdout)
    except subprocess.TimeoutExpired:
        return SelfTest(passed=False, latency_s=None, message=f"no answer within {limit_s:.0f} s")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    latency_s = float(outputs[0].split()[-1])
    return SelfTest(passed=True, latency_s=latency_s, message=f"passed, latency {latency_s * 1e6:.0f} us")


def _versions() -> Table:
    table = folding_table("library", "version", title="Versions")
    table.add_row("pfeife_accelerate", pfeife_accelerate.__version__)
    table.add_row("python", platform.python_version())
    for library in _LIBRARIES:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            version = "not installed"
        table.add_row(library, version)
    table.add_row("platform", platform.platform())
    return table


def _devices() -> Table:
    table = folding_table("what", "found", title="Devices")
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    table.add_row("backends", ", ".join(name for name, found in backends.items() if found) or "none")
    table.add_row("backend of a launch here", "nccl" if torch.cuda.is_available() else "gloo")
    table.add_row("CPU threads", str(torch.get_num_threads()))
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{device.name}, {device.total_memory / 2**30:.1f} GiB")
    if not torch.cuda.is_available():
        table.add_row("CUDA devices", "none")
    return table


def _seams(failures: list[str]) -> Table:
    table = folding_table("attribute", "put in", "now", "signature", title="Patched attributes")
    for row in seams.check():
        name = f"{row.seam.owner.rpartition('.')[2]}.{row.seam.name}"
        if row.matches:
            signature = "as known"
        else:
            signature = f"expected {row.seam.signature}, found {row.found_signature or 'nothing'}"
            failures.append(f"{row.seam.owner}.{row.seam.name}: {signature}")
        table.add_row(name, row.seam.when.value, "in" if row.is_installed else "out", signature)
    return table


def _options(failures: list[str]) -> Table:
    table = folding_table("variable", "value", title="Options in force (environment)")
    for variable, value in sorted(section_variables().items()):
        table.add_row(variable, value)
    if not is_enabled():
        table.add_row("none", "pipelines are off unless the yaml has a pfeife_config section")
        return table
    try:
        PfeifePlugin.from_environment()
    except PfeifeError as error:
        failures.append(str(error))
    return table


def _exchange(port: int, rank: int, *, rounds: int = 200) -> float:
    """One of the two processes: exchange a tensor, check it, and give the mean time of one way."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.zeros(64)
    start_s = 0.0
    for number in range(rounds + 1):
        if number == 1:  # the first exchange connects
            start_s = time.perf_counter()
        if rank == 0:
            dist.send(tensor + 1, dst=1)
            dist.recv(tensor, src=1)
        else:
            dist.recv(tensor, src=0)
            dist.send(tensor + 1, dst=0)
    elapsed_s = time.perf_counter() - start_s
    expected = 2.0 * (rounds + 1) - (rank == 1)
    if not torch.equal(tensor, torch.full((64,), expected)):
        raise PfeifeError(id="PF130", what=f"rank {rank} received {tensor[0].item()}, expected {expected}")
    dist.barrier()
    dist.destroy_process_group()
    return elapsed_s / rounds / 2


if __name__ == "__main__":
    print(_exchange(int(sys.argv[1]), int(sys.argv[2])))
