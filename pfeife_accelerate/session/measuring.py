"""What the planner is told of this launch: costs of the captured operations, and the machine.

Models: measurements kept from run to run in the cache folder; only operations that are new there take time.
Ignores: other ranks' devices, which are taken to be like this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.config import PfeifePlugin, cache_folder
from pfeife_accelerate.cost.hardware import device_spec, link_spec
from pfeife_accelerate.cost.link_profile import LinkProfile, backend_of
from pfeife_accelerate.cost.op_profile import measure
from pfeife_accelerate.cost.store import op_profiles
from pfeife_accelerate.ir import CostTable, DeviceSpec, Machine
from pfeife_accelerate.ir.costs import MeasurableOp
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.progress import MeasuringProgress

__all__ = ["machine_here", "measured", "measured_costs"]


def measured_costs(
    plugin: PfeifePlugin, call: Call, rows: int, device: torch.device, *, budget_s: float = 20.0
) -> CostTable:
    """What each operation costs on `device` for a micro-batch of `rows`; what is left after `budget_s` is modelled."""
    ops = measurable_ops(call.graph, call.micro_bindings(rows), device, autocast=call.autocast)
    return measured(ops, plugin, device, budget_s=budget_s)


def measured(
    ops: Sequence[MeasurableOp | None],
    plugin: PfeifePlugin,
    device: torch.device,
    *,
    budget_s: float,
    spec: DeviceSpec | None = None,
) -> CostTable:
    """`measure` with its progress shown; it knows what is kept in the cache folder, and keeps there what is new."""
    store = op_profiles(cache_folder(plugin), device)
    known = store.read()
    profiles = dict(known)
    with MeasuringProgress("measuring operations") as progress:
        costs = measure(ops, device, budget_s=budget_s, spec=spec, profiles=profiles, progress=progress)
    store.add({key: profile for key, profile in profiles.items() if key not in known})
    return CostTable(ops=costs)


def machine_here(mesh: PipelineMesh, device: torch.device, links: LinkProfile | None) -> Machine:
    """The devices and links of this launch; without measured links, typical ones of the backend."""
    local = mesh.world_size if links is None or links.ranks_per_host is None else links.ranks_per_host
    return Machine(
        devices=(device_spec(device, local_ranks=local),),
        link=link_spec(backend_of(mesh.pipeline_group, device)) if links is None else links.link,
        ranks_per_host=None if links is None else links.ranks_per_host,
        link_between_hosts=None if links is None or links.ranks_per_host is None else links.between,
    )
