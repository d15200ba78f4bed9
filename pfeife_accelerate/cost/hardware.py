"""The devices and links of this machine as the planner sees them.

Models: one matrix product for each element type, one large copy, one empty operation, the memory there is, and what
the host needs for an action of the executor.
Ignores: throttling, what other processes use meanwhile, and the real links: their numbers are typical, not measured.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from pfeife_accelerate.ir import DeviceSpec, LinkSpec

__all__ = ["ACTION_LAUNCHES", "device_name", "device_spec", "link_spec", "memory_bytes"]

_LINKS = {
    "gloo": LinkSpec(latency_s=1.5e-4, bytes_per_s=1.5e9),  # over the loopback device
    "nccl": LinkSpec(latency_s=2e-5, bytes_per_s=5e10),
}
#: Host time of an action (a stage on one micro-batch, with its messages) in small operations on the CPU, which tell how
#: fast the host runs Python and PyTorch. From eight stages of one multiplication each on two ranks over gloo (looped
#: order, 8 micro-batches): 140 us of the main thread's time an action beyond its operations, where adding 1 to a tensor
#: of one element took 2.2 us. Of the 140 us, 25 us are the executor's, the rest is for 1.75 messages an action.
#: tests/gloo/test_link_profile.py repeats it.
ACTION_LAUNCHES = 60
#: On a CPU the operations of a stage leave nothing of the executor in the caches: on a ViT's stages of 10 to 50 ms an
#: action took 0.3 to 0.4 ms.
_COLD = 2.5
_SLOW_S = 0.02  # a product that takes longer is not repeated


def link_spec(backend: str) -> LinkSpec:
    """Typical speed of a `torch.distributed` backend (`"gloo"`, `"nccl"`); an unknown one is taken for gloo."""
    return _LINKS.get(backend.split(":")[-1], _LINKS["gloo"])


def device_spec(device: torch.device, local_ranks: int = 1) -> DeviceSpec:
    """What a device can do, roughly, in under 0.3 s; host memory is shared by `local_ranks` processes."""
    is_cuda = device.type == "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if is_cuda else (torch.float32, torch.bfloat16)
    elements = (1 << 28) // 4 if is_cuda else (1 << 24) // 4
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if is_cuda else []):
        source = torch.zeros(elements, device=device)
        target = torch.zeros_like(source)
        copy_s = _typical_s(lambda: target.copy_(source), device)
        small = torch.zeros(1, device=device)
        host_launch_s = _host_launch_s()
        launch_s = _typical_s(lambda: small.add(1.0), device, calls=50) if is_cuda else host_launch_s
        rates = tuple(
            (str(dtype).removeprefix("torch."), _product_rate(4096 if is_cuda else 256, dtype, device))
            for dtype in dtypes
        )
    return DeviceSpec(
        name=device_name(device),
        memory_bytes=memory_bytes(device) // (1 if is_cuda else max(local_ranks, 1)),
        flops_per_s=rates,
        bytes_per_s=2 * elements * 4 / copy_s,
        launch_s=launch_s,
        action_s=ACTION_LAUNCHES * host_launch_s * (1.0 if is_cuda else _COLD),
        runs_ahead=is_cuda,
    )


def _host_launch_s() -> float:
    """Least seconds of this thread for a small operation on the CPU.

    While another process has the core none pass. Whatever else disturbs only adds: medians were up to twice as long.
    """
    small = torch.zeros(1)

    def once(calls: int = 50) -> float:
        start = time.thread_time()
        for _ in range(calls):
            small.add(1.0)
        return max((time.thread_time() - start) / calls, 1e-9)

    return min(once() for _ in range(20))


def device_name(device: torch.device) -> str:
    """What kind of device this is: equal names, equal speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"cpu {model}".strip()


def _product_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    left = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / _typical_s(lambda: left @ left, device)


def _typical_s(run: Callable[[], object], device: torch.device, calls: int = 1, repeats: int = 3) -> float:
    """Median seconds of one run, after one to warm up which counts alone if it is slow."""

    def once(calls: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _wait(device)
        return max((time.perf_counter() - start) / calls, 1e-9)

    first = once(1)
    if device.type != "cuda" and first > _SLOW_S:
        return first
    return median(once(calls) for _ in range(repeats))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bytes(device: torch.device) -> int:
    """Bytes of a GPU's memory; of the host, those that are available now."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:  # counts what the kernel would give back from its caches, which SC_AVPHYS_PAGES does not
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
