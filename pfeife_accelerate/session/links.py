"""The links between the ranks of a pipeline, measured once for these hosts: all ranks take part before rank 0 plans.

Models: world rank 0 knows whether they have been measured before, and everybody hears from it whether they are to be
measured now, so that no rank waits for one that does not come.
Ignores: links between pipelines, which carry the averages of gradients alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist

from pfeife_accelerate.cost.hardware import device_name
from pfeife_accelerate.cost.link_profile import LinkProfile, backend_of, hosts_of, measure_links
from pfeife_accelerate.cost.store import Store
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.runtime.transport import AbstractTransport

_LOG = get_logger(__name__)
_KEY = "links"


def agree_on_links(
    mesh: PipelineMesh, transport: AbstractTransport, device: torch.device, folder: Path, *, is_wanted: bool = True
) -> LinkProfile | None:
    """The links of the first pipeline, on world rank 0; None elsewhere, without a need, and for a single rank.

    Every rank of the launch calls it at the same moment; what rank 0 says in `is_wanted` counts.
    """
    if mesh.pipeline_size == 1:
        return None
    hosts = hosts_of(mesh.world_control_group)
    store, known = _store(folder, mesh, transport, device, hosts), None
    if mesh.world_rank == 0 and is_wanted:
        known = store.read().get(_KEY)
    must_measure = torch.tensor([is_wanted and known is None])
    dist.broadcast(must_measure, group=mesh.world_control_group, group_src=0)
    if not bool(must_measure):
        return known
    first = mesh.pipeline_index * mesh.pipeline_size
    found = measure_links(mesh.pipeline_group, transport, device, hosts[first : first + mesh.pipeline_size])
    if mesh.world_rank != 0:
        return None
    store.add({_KEY: found})
    _LOG.info("links: %.0f us and %.2f GB/s each way", found.link.latency_s * 1e6, found.link.bytes_per_s / 1e9)
    return found


def _store(
    folder: Path, mesh: PipelineMesh, transport: AbstractTransport, device: torch.device, hosts: tuple[str, ...]
) -> Store[LinkProfile]:
    subject = {
        "backend": backend_of(mesh.pipeline_group, device),
        "transport": type(transport).__name__,
        "hosts": hashlib.sha256(" ".join(hosts).encode()).hexdigest()[:16],
        "device": device_name(device),
        "torch": torch.__version__,
        "ranks": f"{mesh.world_size} in pipelines of {mesh.pipeline_size}",
    }
    return Store(folder, _KEY, subject, LinkProfile)
