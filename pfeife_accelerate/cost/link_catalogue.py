"""Links that are not here, as their makers describe them, and what of that is reached.

Models: bandwidth in one direction, by data sheet; the share of it that transfers reach, apart; the time of the smallest
message through NCCL or gloo. Each number stands beside where it is from.
Ignores: contention, topology within a host beyond "every pair alike", and routes over several switches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pfeife_accelerate.ir import LinkSpec

__all__ = ["LINKS", "LinkSheet", "Stated"]

_ML_ENGINEERING = "S. Bekman, Machine Learning Engineering Open Book (github.com/stas00/ml-engineering)"
_PAIR_COPY = f"{_ML_ENGINEERING}, network: nvbandwidth measures 396 of 450 GB/s one way, 392 each way at once (H200)"
_PCIE_COPY = f"{_ML_ENGINEERING}, network: nvbandwidth measures 55 of 63 GB/s (PCIe 5 x16)"
_NCCL_SEND = "judgement: NCCL's send kernel and its matching cost 10-20 us a message in eager PyTorch; no data sheet"
_NCCL_NET = "judgement: as within a host, and some 5 us for the proxy thread and the wire; no data sheet"


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A number and who states it."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class LinkSheet:
    """One kind of link between two devices, in one direction."""

    bytes_per_s: Stated
    reached: Stated  #: share of it
    latency_s: Stated

    @property
    def spec(self) -> LinkSpec:
        """As the planner sees it."""
        return LinkSpec(latency_s=self.latency_s.value, bytes_per_s=self.bytes_per_s.value * self.reached.value)


_GPU_LATENCY = Stated(value=15e-6, source=_NCCL_SEND)
_NET_LATENCY = Stated(value=20e-6, source=_NCCL_NET)
_PAIR_SHARE = Stated(value=0.87, source=_PAIR_COPY)
_PCIE_SHARE = Stated(value=0.87, source=_PCIE_COPY)
_NET_SHARE = Stated(value=0.85, source="judgement: headers and NCCL's protocol; well tuned clusters reach 0.8-0.95")

LINKS: Final[dict[str, LinkSheet]] = {
    "nvlink3": LinkSheet(
        bytes_per_s=Stated(value=300e9, source="NVIDIA A100 data sheet: NVLink 600 GB/s, both directions together"),
        reached=_PAIR_SHARE,
        latency_s=_GPU_LATENCY,
    ),
    "nvlink4": LinkSheet(
        bytes_per_s=Stated(value=450e9, source="NVIDIA H100 data sheet: NVLink 900 GB/s, both directions together"),
        reached=_PAIR_SHARE,
        latency_s=_GPU_LATENCY,
    ),
    "nvlink5": LinkSheet(
        bytes_per_s=Stated(value=900e9, source="NVIDIA HGX B200: NVLink 1.8 TB/s a GPU, both directions together"),
        reached=_PAIR_SHARE,
        latency_s=_GPU_LATENCY,
    ),
    "infinity-fabric": LinkSheet(
        bytes_per_s=Stated(
            value=64e9,
            source="AMD Instinct MI300X data sheet: 128 GB/s a link, taken as both directions; one link to each peer",
        ),
        reached=Stated(value=0.75, source="judgement: RCCL reaches 45-50 of 64 GB/s; no data sheet"),
        latency_s=_GPU_LATENCY,
    ),
    "pcie4": LinkSheet(
        bytes_per_s=Stated(value=31.5e9, source="PCI-SIG: 16 GT/s, 128b/130b, 16 lanes, one direction"),
        reached=_PCIE_SHARE,
        latency_s=_GPU_LATENCY,
    ),
    "pcie5": LinkSheet(
        bytes_per_s=Stated(value=63e9, source="PCI-SIG: 32 GT/s, 128b/130b, 16 lanes, one direction"),
        reached=_PCIE_SHARE,
        latency_s=_GPU_LATENCY,
    ),
    "pcie4-host": LinkSheet(
        bytes_per_s=Stated(value=31.5e9, source="PCI-SIG: 16 GT/s, 128b/130b, 16 lanes, one direction"),
        reached=Stated(
            value=0.4,
            source="judgement: GeForce cards have no peer-to-peer access, so that each message is copied through the "
            "host's memory: two copies that overlap in part",
        ),
        latency_s=Stated(value=30e-6, source="judgement: two copies and their synchronisation; no data sheet"),
    ),
    "infiniband-hdr": LinkSheet(
        bytes_per_s=Stated(value=25e9, source="NVIDIA ConnectX-6 data sheet: HDR 200 Gb/s; one adapter a GPU"),
        reached=_NET_SHARE,
        latency_s=_NET_LATENCY,
    ),
    "infiniband-ndr": LinkSheet(
        bytes_per_s=Stated(value=50e9, source="NVIDIA ConnectX-7 data sheet: NDR 400 Gb/s; one adapter a GPU"),
        reached=_NET_SHARE,
        latency_s=_NET_LATENCY,
    ),
    "ethernet-100g": LinkSheet(
        bytes_per_s=Stated(value=12.5e9, source="IEEE 802.3: 100 Gb/s; one adapter a host, here given to one pair"),
        reached=Stated(value=0.8, source="judgement: TCP through the kernel, several streams; no data sheet"),
        latency_s=Stated(value=50e-6, source="judgement: 10-30 us a side in the kernel's TCP stack; no data sheet"),
    ),
    "gloo-loopback": LinkSheet(
        bytes_per_s=Stated(value=1.5e9, source="measured: gloo over the loopback device of a two-core virtual machine"),
        reached=Stated(value=1.0, source="measured as reached"),
        latency_s=Stated(value=150e-6, source="measured: the same, messages of one byte, half a round trip"),
    ),
}
