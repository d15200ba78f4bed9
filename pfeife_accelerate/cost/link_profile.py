"""How fast the ranks of a process group are connected, measured while all of them are busy sending.

Models: the time of the smallest message; bandwidth in each direction with both directions and all disjoint pairs in use
at once, as in a running pipeline, of messages that are in no cache of a core; pairs within a host and between hosts
apart. The slowest pair of each kind stands for all of them.
Ignores: every pair but neighbours and opposites (a pipeline sends to neighbours most), and what else uses the network.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist

from pfeife_accelerate.ir import LinkSpec

__all__ = [
    "LinkProfile", "Receive", "Transport", "backend_of", "hosts_of", "measure_links", "pairings", "ranks_per_host",
]  # fmt: skip

_PINGS = 32
_REPEATS = 5
_SIZES = {"cpu": (1 << 18, 1 << 22), "cuda": (1 << 20, 1 << 25)}
_DIFFERENT = 4  # large messages that are sent in turn
_SLOW_S = 0.03  # a small message that takes longer is not followed by a large one
_TAG = 1 << 30  # beyond the tags of values and gradients


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """What was measured. `within` and `between` are None where no pair of that kind was tried.

    `ranks_per_host` is None where all ranks share a host, or hosts have different numbers of them.
    `alone` is the first pair with nobody else sending.
    """

    within: LinkSpec | None
    between: LinkSpec | None
    alone: LinkSpec
    ranks_per_host: int | None = None

    @property
    def link(self) -> LinkSpec:
        """The link between ranks of one host; the slower one where hosts cannot be told from ranks."""
        known = [link for link in (self.within, self.between) if link is not None]
        if self.ranks_per_host is None or self.within is None:
            return _slowest(known or [self.alone])
        return self.within


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that the group uses for a device: its description reads `cpu:gloo,cuda:nccl`."""
    by_device = dict(entry.split(":", 1) for entry in str(dist.get_backend_config(group)).split(","))
    return by_device[device.type]


def hosts_of(group: dist.ProcessGroup) -> tuple[str, ...]:
    """For each rank of a gloo group, a short digest of its host's name. All ranks call it."""
    digest = hashlib.sha256(socket.gethostname().encode()).digest()[:6]
    own = torch.tensor(list(digest), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return tuple(bytes(host.tolist()).hex() for host in found)


class Receive(Protocol):
    """A receive that has been posted."""

    def wait(self) -> torch.Tensor:
        """Block until the tensor is there, and return it."""


class Transport(Protocol):
    """What carries tensors between the ranks: the runtime's own."""

    @property
    def copies(self) -> bool:
        """Whether ranks of one host carry messages themselves."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return."""

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> Receive:
        """Announce a receive and return."""

    def flush(self) -> None:
        """Block until all own sends have completed."""


def measure_links(
    group: dist.ProcessGroup, transport: Transport, device: torch.device, hosts: Sequence[str]
) -> LinkProfile:
    """Measure how `transport` connects the ranks of `group`, which all call it at the same moment; the same result on
    each.

    `hosts` names the host of each rank of the group. Takes well under a second on links of 1 Gb/s or more.
    """
    # Through gloo, tensors of a GPU travel as copies in the host's memory.
    runner = _Runner(group, transport, device if backend_of(group, device) == "nccl" else torch.device("cpu"))
    rounds = pairings(dist.get_world_size(group))
    runner.warm_up(rounds)
    own: list[tuple[float, float, float]] = [runner.measure(partners) for partners in rounds]
    alone = runner.measure({rank: peer for rank, peer in rounds[0].items() if rank in (0, 1)})
    table = runner.gathered([*own, alone])
    found: dict[bool, list[LinkSpec]] = {True: [], False: []}
    for rank, row in enumerate(table):
        for peer, latency_s, bytes_per_s in row[:-1]:
            if peer >= 0:
                same_host = hosts[rank] == hosts[int(peer)]
                link = LinkSpec(latency_s=latency_s, bytes_per_s=bytes_per_s, is_copied=transport.copies and same_host)
                found[same_host].append(link)
    _, latency_s, bytes_per_s = table[0][-1]
    is_copied = transport.copies and len(set(hosts[:2])) == 1
    return LinkProfile(
        within=_slowest(found[True]) if found[True] else None,
        between=_slowest(found[False]) if found[False] else None,
        alone=LinkSpec(latency_s=latency_s, bytes_per_s=bytes_per_s, is_copied=is_copied),
        ranks_per_host=ranks_per_host(hosts),
    )


def pairings(num_ranks: int) -> list[dict[int, int]]:
    """Rounds in which each rank has at most one partner: neighbours both ways, then opposites."""
    starts = [range(0, num_ranks - 1, 2), range(1, num_ranks - 1, 2)]
    rounds = [{a: a + 1 for a in start} for start in starts]
    if num_ranks > 3:
        rounds.append({a: a + num_ranks // 2 for a in range(num_ranks // 2)})
    return [{**half, **{b: a for a, b in half.items()}} for half in rounds if half]


def ranks_per_host(hosts: Sequence[str]) -> int | None:
    """How many neighbouring ranks share a host, if all hosts have equally many and there are several."""
    sizes = [len(list(ranks)) for _, ranks in groupby(hosts)]
    is_regular = len(set(sizes)) == 1 and len(sizes) == len(set(hosts)) > 1
    return sizes[0] if is_regular else None


def _slowest(links: Sequence[LinkSpec]) -> LinkSpec:
    return max(links, key=lambda link: link.transfer_s(1 << 20))


class _Runner:
    """One rank's part. Every rank goes through the same calls, with or without a partner."""

    def __init__(self, group: dist.ProcessGroup, transport: Transport, device: torch.device) -> None:
        self.group = group
        self.transport = transport
        self.device = device
        self.rank = dist.get_rank(group)
        self.sizes = _SIZES["cuda" if device.type == "cuda" else "cpu"]
        self.sent = torch.ones(_DIFFERENT * self.sizes[-1], dtype=torch.uint8, device=device)  # zeros have no memory
        self.offset = 0

    def warm_up(self, rounds: Sequence[dict[int, int]]) -> None:
        """The first message between two ranks connects them."""
        for partners in rounds:
            if self.rank in partners:
                self.exchange(partners[self.rank], 1)

    def measure(self, partners: dict[int, int]) -> tuple[float, float, float]:
        """(partner, latency, bytes/s) of one round; the partner is -1 for a rank that has none."""
        peer = partners.get(self.rank, -1)
        self.agreed(0.0)
        latency_s = self.latency_s(peer) if peer >= 0 else 0.0
        small, large = self.sizes
        small_s = self.exchange_s(peer, small)
        # Both sides must send equally many messages: what is slow is decided together.
        if self.agreed(small_s) > _SLOW_S:
            return float(peer), latency_s, small / max(small_s, 1e-9)
        large_s = self.exchange_s(peer, large)
        self.agreed(large_s)
        difference_s = large_s - small_s
        is_plausible = difference_s > large_s / 4  # the clock may have been off for one of them
        rate = (large - small) / difference_s if is_plausible else large / max(large_s, 1e-9)
        return float(peer), latency_s, rate

    def latency_s(self, peer: int) -> float:
        """Half a round trip: the lower decile, since whoever is woken late by a busy host is late by a millisecond."""
        trips = sorted(self.timed(lambda: self.ping(peer)) for _ in range(_PINGS))
        return trips[_PINGS // 10] / 2

    def exchange_s(self, peer: int, num_bytes: int) -> float:
        if peer < 0:
            return 0.0
        self.exchange(peer, num_bytes)
        return median(self.timed(lambda: self.exchange(peer, num_bytes)) for _ in range(_REPEATS))

    def exchange(self, peer: int, num_bytes: int) -> None:
        """Send and receive at once."""
        receive = self.receive(peer, num_bytes)
        self.offset = self.offset if self.offset + num_bytes <= len(self.sent) else 0
        self.transport.send(self.sent[self.offset : self.offset + num_bytes], peer, _TAG)
        self.offset += num_bytes
        receive.wait()
        self.transport.flush()

    def ping(self, peer: int) -> None:
        """One byte there and back."""
        receive = self.receive(peer, 1)
        if self.rank < peer:
            self.transport.send(self.sent[:1], peer, _TAG)
            receive.wait()
        else:
            receive.wait()
            self.transport.send(self.sent[:1], peer, _TAG)
        self.transport.flush()

    def receive(self, peer: int, num_bytes: int) -> Receive:
        return self.transport.post_receive((num_bytes,), torch.uint8, self.device, peer, _TAG)

    def timed(self, run: Callable[[], None]) -> float:
        start_s = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start_s

    def agreed(self, seconds: float) -> float:
        """The largest of all ranks' numbers; nobody goes on before everybody is here."""
        number = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        return float(number)

    def gathered(self, own: Sequence[tuple[float, float, float]]) -> list[list[tuple[float, float, float]]]:
        """All ranks' rows."""
        row = torch.tensor(own, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, row, group=self.group)
        return [[(float(a), float(b), float(c)) for a, b, c in found.tolist()] for found in rows]
