"""The hardware as the planner sees it.

Models: a device's speed and memory, what the host needs for an action, directed links within and between hosts.
Ignores: contention between links.
"""

from __future__ import annotations

from dataclasses import dataclass

from pfeife_accelerate.errors import PfeifeError

__all__ = ["DeviceSpec", "LinkSpec", "Machine"]


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One device; `flops_per_s` holds (element type, rate) pairs, `launch_s` the least time of any operation.

    The host needs `action_s` to start an action (one stage on one micro-batch, with its messages). A device that
    `runs_ahead` computes meanwhile, so that an action takes the longer of both; on a CPU it takes their sum.
    """

    name: str
    memory_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]
    bytes_per_s: float
    launch_s: float
    action_s: float = 0.0
    runs_ahead: bool = True

    def flops_per_s_of(self, dtype: str) -> float:
        """Rate for an element type; an unlisted one takes the slowest rate, so that it is never flattered."""
        rates = dict(self.flops_per_s)
        if not rates:
            raise PfeifeError(id="PF152", what=f"device {self.name!r} has no flops_per_s at all")
        return rates.get(dtype, min(rates.values()))


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A directed link: a transfer takes `latency_s + bytes / bytes_per_s` and holds the link for all of it.

    Where it `is_copied`, there is no link: the sender's device copies for half of that time, behind the action that
    made the values, and the reader's for the other half, before the first action that reads them. So it is between two
    processes on CPUs that share memory.
    """

    latency_s: float
    bytes_per_s: float
    is_copied: bool = False

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds that a message of `num_bytes` takes, from its producer to its reader."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def copy_s(self, num_bytes: int) -> float:
        """How long either device is busy with it."""
        return self.transfer_s(num_bytes) / 2 if self.is_copied else 0.0

    def wire_s(self, num_bytes: int) -> float:
        """How long the link is busy with it."""
        return 0.0 if self.is_copied else self.transfer_s(num_bytes)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices, one per rank (a single one stands for all), and the links: `link` between ranks of one host.

    Without `ranks_per_host` all ranks share a host; `link_between_hosts` is None where that link is no other.
    """

    devices: tuple[DeviceSpec, ...]
    link: LinkSpec
    ranks_per_host: int | None = None
    link_between_hosts: LinkSpec | None = None

    def device_of(self, rank: int) -> DeviceSpec:
        """The device of a rank."""
        return self.devices[rank if len(self.devices) > 1 else 0]

    def link_of(self, sender: int, receiver: int) -> LinkSpec:
        """The directed link between two ranks."""
        size = self.ranks_per_host
        if size is None or self.link_between_hosts is None or sender // size == receiver // size:
            return self.link
        return self.link_between_hosts
