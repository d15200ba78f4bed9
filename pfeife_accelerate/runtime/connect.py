"""The transport of a pipeline: what fits the devices and the hosts of its ranks.

Models: GPUs by the process group's own backend; processes on one host by shared memory, and on different hosts by gloo.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pfeife_accelerate.compat import group_timeout
from pfeife_accelerate.runtime.host_links import connect_host
from pfeife_accelerate.runtime.host_transport import HostTransport, RoutedTransport
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.runtime.transport import AbstractTransport, DistributedTransport

__all__ = ["connect"]


def connect(mesh: PipelineMesh, store: dist.Store, device: torch.device) -> AbstractTransport:
    """Between the ranks of this process's pipeline; every rank of the launch calls it, once."""
    group, size = mesh.pipeline_group, mesh.pipeline_size
    distributed = DistributedTransport(group, device, mesh.pipeline_reverse_group)
    if distributed.needs_order:
        return distributed
    prefix = f"pfeife/hosts/{mesh.pipeline_index}"
    links = connect_host(store, prefix, mesh.rank, size, group_timeout(group))
    if not links:
        return distributed
    host = HostTransport(mesh.rank, size, links)
    return host if len(links) == size - 1 else RoutedTransport(host, frozenset(links), distributed)
