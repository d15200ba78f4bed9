"""Machines that are not here: what makers state of their devices, and what of that a training reaches.

Models: memory, dense rates by element type (never those "with sparsity"), memory bandwidth, the least time of an
operation; each number beside its source. What is reached is stated apart, with its reason, because no data sheet tells.
Ignores: throttling, size (a small product reaches less: `launch_s` and the memory bandwidth bound it, its shape does
not), and prices. Measure instead where you can, or calibrate by a few measurements (`calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pfeife_accelerate.cost.hardware import ACTION_LAUNCHES
from pfeife_accelerate.cost.link_catalogue import LINKS, Stated
from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.ir import DeviceSpec, LinkSpec, Machine

__all__ = ["DEVICES", "DeviceSheet", "device", "link", "machine"]

_GIB = 1 << 30
_T = 1e12
_A100 = "NVIDIA A100 data sheet (SXM)"
_H100 = "NVIDIA H100 data sheet (SXM); its tensor rates are with sparsity, these are half of them"
_H200 = "NVIDIA H200 data sheet (SXM); its tensor rates are with sparsity, these are half of them"
_B200 = "NVIDIA HGX B200 data sheet, an eighth of the board; its tensor rates are with sparsity, these are half of them"
_L40S = "NVIDIA L40S data sheet"
_AMPERE = "NVIDIA Ampere GA102 whitepaper, GeForce RTX 3090, dense, accumulating in FP32"
_ADA = "NVIDIA Ada whitepaper, GeForce RTX 4090, dense, accumulating in FP32"
_MI300X = "AMD Instinct MI300X data sheet"
_CPU = "eight cores of a server: 2 FMA units of 8 floats at 3.0 GHz each (AVX2; Intel and AMD optimisation manuals)"
_DDR4 = "two of a socket's eight channels of DDR4-3200 (JEDEC: 25.6 GB/s each)"

_MATMUL = (
    "best product found in bfloat16, S. Bekman, Machine Learning Engineering Open Book (github.com/stas00/"
    "ml-engineering), accelerators: maximum achievable matmul FLOPS"
)
_NO_MATMUL = "judgement: as the NVIDIA cards with a figure; no published one is known"
_COPY = Stated(
    value=0.85,
    source="judgement: large elementwise kernels move 80-92 % of the stated rate on HBM and GDDR; no data sheet",
)
_LAUNCH = Stated(
    value=5e-6,
    source="NVIDIA, Getting Started with CUDA Graphs (2019): 3.8 us a short kernel in a stream; eager PyTorch's own "
    "dispatch adds to it",
)
_HOST_LAUNCH = Stated(value=2e-6, source="measured: a small addition on the CPU in eager PyTorch takes 2-2.5 us")
#: Drivers and contexts keep this much: 79.1 of 80 GiB (A100, H100), 39.4 of 40, 139.8 of 141 (H200) are reported free.
_MEMORY_THERE = 0.985


@dataclass(frozen=True, kw_only=True)
class DeviceSheet:
    """One device by its maker's words. `tf32` is None where there is no such rate."""

    memory_gib: Stated
    bytes_per_s: Stated
    float32: Stated
    tf32: Stated | None
    float16: Stated
    bfloat16: Stated
    products: Stated  #: share of the rates that large products reach
    copies: Stated = _COPY  #: share of the bandwidth that large copies reach
    launch_s: Stated = _LAUNCH
    host_launch_s: Stated = _HOST_LAUNCH  #: of a small operation on the host; an action takes `ACTION_LAUNCHES` of them
    runs_ahead: bool = True
    link: str
    link_between_hosts: str
    aliases: tuple[str, ...] = ()


def _sheet(
    source: str, *, gib: float, gb_per_s: float, float32: float, tf32: float | None, half: float, **rest: object
) -> DeviceSheet:
    """A sheet of one source, rates in Tflop/s; `half` stands for float16 and bfloat16, which no maker tells apart."""
    return DeviceSheet(
        memory_gib=Stated(value=gib, source=source),
        bytes_per_s=Stated(value=gb_per_s * 1e9, source=source),
        float32=Stated(value=float32 * _T, source=source),
        tf32=None if tf32 is None else Stated(value=tf32 * _T, source=source),
        float16=Stated(value=half * _T, source=source),
        bfloat16=Stated(value=half * _T, source=source),
        **rest,  # type: ignore[arg-type]
    )


_SXM_A100 = {"products": Stated(value=0.87, source=_MATMUL), "link": "nvlink3", "link_between_hosts": "infiniband-hdr"}
_SXM_H100 = {"products": Stated(value=0.80, source=_MATMUL), "link": "nvlink4", "link_between_hosts": "infiniband-ndr"}

DEVICES: Final[dict[str, DeviceSheet]] = {
    "A100-40GB": _sheet(
        _A100, gib=40, gb_per_s=1555, float32=19.5, tf32=156, half=312, aliases=("a100-sxm4-40gb",), **_SXM_A100
    ),
    "A100-80GB": _sheet(
        _A100, gib=80, gb_per_s=2039, float32=19.5, tf32=156, half=312, aliases=("a100", "a100-sxm4-80gb"), **_SXM_A100
    ),
    "H100": _sheet(
        _H100, gib=80, gb_per_s=3350, float32=67, tf32=494.5, half=989.5,
        aliases=("h100-sxm", "h100-80gb", "h100-80gb-hbm3"), **_SXM_H100,
    ),
    "H200": _sheet(
        _H200, gib=141, gb_per_s=4800, float32=67, tf32=494.5, half=989.5, aliases=("h200-sxm",), **_SXM_H100
    ),
    "B200": _sheet(
        _B200, gib=180, gb_per_s=8000, float32=75, tf32=1125, half=2250, aliases=("b200-sxm",),
        products=Stated(value=0.78, source=_MATMUL), link="nvlink5", link_between_hosts="infiniband-ndr",
    ),
    "L40S": _sheet(
        _L40S, gib=48, gb_per_s=864, float32=91.6, tf32=183, half=362.05,
        products=Stated(value=0.8, source=_NO_MATMUL), link="pcie4", link_between_hosts="ethernet-100g",
    ),
    "RTX-3090": _sheet(
        _AMPERE, gib=24, gb_per_s=936, float32=35.6, tf32=35.6, half=71, aliases=("geforce-rtx-3090", "3090"),
        products=Stated(value=0.8, source=_NO_MATMUL), link="pcie4-host", link_between_hosts="ethernet-100g",
    ),
    "RTX-4090": _sheet(
        _ADA, gib=24, gb_per_s=1008, float32=82.6, tf32=82.6, half=165.2, aliases=("geforce-rtx-4090", "4090"),
        products=Stated(value=0.8, source=_NO_MATMUL), link="pcie4-host", link_between_hosts="ethernet-100g",
    ),
    "MI300X": _sheet(
        _MI300X, gib=192, gb_per_s=5300, float32=163.4, tf32=653.7, half=1307.4, aliases=("mi300",),
        products=Stated(value=0.51, source=_MATMUL), link="infinity-fabric", link_between_hosts="infiniband-ndr",
    ),
    "CPU": DeviceSheet(
        memory_gib=Stated(value=64, source="eight of a server's 32 cores, and their share of 256 GiB"),
        bytes_per_s=Stated(value=51.2e9, source=_DDR4),
        float32=Stated(value=0.768 * _T, source=_CPU),
        tf32=None,
        float16=Stated(value=0.768 * _T, source=f"{_CPU}; computed as float32 after a conversion"),
        bfloat16=Stated(value=0.768 * _T, source=f"{_CPU}; computed as float32 after a conversion (no AMX)"),
        products=Stated(value=0.7, source="judgement: oneDNN's products on all cores at once, which clock lower"),
        copies=Stated(value=0.7, source="judgement: STREAM reaches 70-80 % of a DDR4 channel"),
        launch_s=_HOST_LAUNCH,
        runs_ahead=False,
        link="gloo-loopback",
        link_between_hosts="ethernet-100g",
    ),
}  # fmt: skip


def device(name: str, *, allow_tf32: bool = False) -> DeviceSpec:
    """A device of the catalogue as the planner sees it: the stated numbers times what is reached of them.

    PyTorch computes products of float32 in float32, unless `torch.set_float32_matmul_precision("high")` allows TF32:
    say so with `allow_tf32`.
    """
    known, sheet = _find(name)
    single = sheet.tf32 if allow_tf32 and sheet.tf32 is not None else sheet.float32
    rates = (("float32", single), ("float16", sheet.float16), ("bfloat16", sheet.bfloat16))
    return DeviceSpec(
        name=known,
        memory_bytes=int(sheet.memory_gib.value * _GIB * _MEMORY_THERE),
        flops_per_s=tuple((dtype, rate.value * sheet.products.value) for dtype, rate in rates),
        bytes_per_s=sheet.bytes_per_s.value * sheet.copies.value,
        launch_s=sheet.launch_s.value,
        action_s=ACTION_LAUNCHES * sheet.host_launch_s.value,
        runs_ahead=sheet.runs_ahead,
    )


def link(name: str) -> LinkSpec:
    """A link of the catalogue (`"nvlink4"`, `"infiniband-ndr"`, ...).

    Raises: PfeifeError PF232 for a name that is not in it.
    """
    plain = _plain(name)
    if plain not in LINKS:
        raise _unknown("link", name, tuple(LINKS))
    return LINKS[plain].spec


def machine(name: str, num_ranks: int, *, ranks_per_host: int = 8, allow_tf32: bool = False) -> Machine:
    """`num_ranks` equal devices in hosts of `ranks_per_host`, with the links that such hosts usually have.

    Raises: PfeifeError PF232 for a name that is not in the catalogue.
    """
    _, sheet = _find(name)
    return Machine(
        devices=(device(name, allow_tf32=allow_tf32),),
        link=link(sheet.link),
        ranks_per_host=ranks_per_host if num_ranks > ranks_per_host else None,
        link_between_hosts=link(sheet.link_between_hosts) if num_ranks > ranks_per_host else None,
    )


def _find(name: str) -> tuple[str, DeviceSheet]:
    plain = _plain(name)
    for known, sheet in DEVICES.items():
        if plain in (_plain(known), *sheet.aliases):
            return known, sheet
    raise _unknown("machine", name, tuple(DEVICES))


def _plain(name: str) -> str:
    """Lower case, parts joined by dashes, without the maker: `"NVIDIA A100-SXM4-40GB"` is `a100-sxm4-40gb`."""
    words = name.lower().replace("_", "-").replace(" ", "-").strip("-")
    for maker in ("nvidia-", "amd-", "instinct-"):
        words = words.removeprefix(maker)
    return words


def _unknown(what: str, name: str, known: tuple[str, ...]) -> PfeifeError:
    by_plain = {_plain(entry): entry for entry in known}
    near = did_you_mean(_plain(name), tuple(by_plain))
    names = "known: " + ", ".join(known)
    return PfeifeError(
        id="PF232",
        what=f"no {what} {name!r} in the catalogue",
        hints=(names,) if near is None else (f"did you mean {by_plain[near]!r}?", names),
    )
