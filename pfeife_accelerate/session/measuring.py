"""What the planner is told of this launch: costs of the captured operations, and the machine.

Models: measurements kept from run to run in the cache folder; only operations that are new there take time.
Ignores: other ranks' devices, which are taken to be like this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Final

import torch

from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.trial_stage import trial_stages
from pfeife_accelerate.config import PfeifePlugin, cache_folder
from pfeife_accelerate.cost.hardware import device_spec, link_spec
from pfeife_accelerate.cost.link_profile import LinkProfile, backend_of
from pfeife_accelerate.cost.op_profile import measure
from pfeife_accelerate.cost.stage_trial import as_in_stages, stage_seconds
from pfeife_accelerate.cost.store import op_profiles
from pfeife_accelerate.ir import CostTable, DeviceSpec, Machine
from pfeife_accelerate.ir.costs import MeasurableOp, OpCost, OperandRole
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.progress import MeasuringProgress

__all__ = ["machine_here", "measured", "measured_costs"]

_STAGES: Final = 8
_STAGE_RUNS: Final = 6  #: of each, with some time to make it
_LEAST_STAGE_S: Final = 0.002  #: what takes less is not worth the time
_MOST_STAGE_BYTES: Final = 1 << 29  #: of one that is tried
_TOGETHER_BYTES: Final = 1 << 28  #: of those that are tried together: more than caches hold


def measured_costs(
    plugin: PfeifePlugin, call: Call, rows: int, device: torch.device, *, budget_s: float = 20.0, is_shown: bool = True
) -> CostTable:
    """What each operation costs on `device` for a micro-batch of `rows`; what is left after `budget_s` is modelled.

    Where time allows, operations are then run together, stage by stage, and their costs changed by how they differ.
    Where it is not shown, this rank measures only because others do.
    """
    end_s, bindings = time.perf_counter() + budget_s, call.micro_bindings(rows)
    ops = measurable_ops(call.graph, bindings, device, autocast=call.autocast)
    costs = measured(ops, plugin, device, budget_s=budget_s, is_shown=is_shown)
    found = []
    for group in _groups_to_try(call.graph.cut_allowed, ops, costs):
        if time.perf_counter() + _STAGE_RUNS * sum(_seconds(op) for stage in group for op in costs.ops[stage]) > end_s:
            break
        makers = trial_stages(call.graph, group, bindings, device, call.autocast)
        seconds = zip(group, stage_seconds(makers, device), strict=True)
        found += [(stage, *times) for stage, times in seconds if times is not None]
    return as_in_stages(costs, found)


def _groups_to_try(
    cut_allowed: Sequence[bool], ops: Sequence[MeasurableOp | None], costs: CostTable
) -> Iterator[list[slice]]:
    """Stages that fit into memory together, without those that do not alone."""
    group, group_bytes = list[slice](), 0
    for stage in _stages_to_try(cut_allowed, costs):
        held_bytes = _held_bytes(ops[stage], costs.ops[stage])
        if held_bytes > _MOST_STAGE_BYTES:
            continue
        if group and group_bytes + held_bytes > _TOGETHER_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(stage)
        group_bytes += held_bytes
    if group:
        yield group


def _stages_to_try(cut_allowed: Sequence[bool], costs: CostTable) -> Iterator[slice]:
    """The operations in some stages of about equal time, but for what takes next to no time."""
    least_s = max(sum(map(_seconds, costs.ops)) / _STAGES, _LEAST_STAGE_S)
    start, taken_s = 0, 0.0
    for end, cost in enumerate(costs.ops, 1):
        taken_s += _seconds(cost)
        if end == len(costs.ops) or (cut_allowed[end] and taken_s >= least_s):
            if taken_s >= _LEAST_STAGE_S:
                yield slice(start, end)
            start, taken_s = end, 0.0


def _held_bytes(ops: Sequence[MeasurableOp | None], costs: Sequence[OpCost]) -> int:
    """Parameters with gradients, what is kept for the backward, and the most that an operation needs beside."""
    states = {r.storage: r.storage_bytes for op in ops if op for r in op.reads if r.role is OperandRole.STATE}
    saved_bytes = sum(cost.saved_bytes for cost in costs)
    return 2 * sum(states.values()) + saved_bytes + max((cost.workspace_bytes for cost in costs), default=0)


def _seconds(op: OpCost) -> float:
    return op.forward_s + op.backward_s


def measured(
    ops: Sequence[MeasurableOp | None],
    plugin: PfeifePlugin,
    device: torch.device,
    *,
    budget_s: float,
    spec: DeviceSpec | None = None,
    is_shown: bool = True,
) -> CostTable:
    """`measure` with its progress shown; it knows what is kept in the cache folder, and keeps there what is new."""
    store = op_profiles(cache_folder(plugin), device)
    known = store.read()
    profiles = dict(known)
    with MeasuringProgress("measuring operations") if is_shown else nullcontext() as progress:
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
