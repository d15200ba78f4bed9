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
from pfeife_accelerate.capture.trial_stage import trial_stage
from pfeife_accelerate.config import PfeifePlugin, cache_folder
from pfeife_accelerate.cost.hardware import device_spec, link_spec
from pfeife_accelerate.cost.link_profile import LinkProfile, backend_of
from pfeife_accelerate.cost.op_profile import measure
from pfeife_accelerate.cost.stage_trial import as_in_stages, stage_seconds
from pfeife_accelerate.cost.store import op_profiles
from pfeife_accelerate.ir import CostTable, DeviceSpec, Machine
from pfeife_accelerate.ir.costs import MeasurableOp, OpCost, OperandRole, TrialStage
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.progress import MeasuringProgress

__all__ = ["machine_here", "measured", "measured_costs"]

_LOG = get_logger(__name__)
_STAGES: Final = 8
_STAGE_RUNS: Final = 6  #: of each, with some time to make it
_LEAST_STAGE_S: Final = 0.002  #: what takes less is not worth the time
_MOST_STAGES_BYTES: Final = 1 << 29  #: of all: parameters with gradients, and what is kept for the backward


def measured_costs(
    plugin: PfeifePlugin, call: Call, rows: int, device: torch.device, *, budget_s: float = 20.0, is_kept: bool = True
) -> CostTable:
    """What each operation costs on `device` for a micro-batch of `rows`; what is left after `budget_s` is modelled.

    Where time allows, operations are then run together, stage by stage, and their costs changed by how they differ.
    Where it is not kept, this rank measures only because others do: it leaves no trace, and shows no progress.
    """
    end_s, bindings = time.perf_counter() + budget_s, call.micro_bindings(rows)
    ops = measurable_ops(call.graph, bindings, device, autocast=call.autocast)
    costs = measured(ops, plugin, device, budget_s=budget_s, is_kept=is_kept)
    stages = []
    for stage in _stages_to_try(call.graph.cut_allowed, ops, costs):
        end_s -= _STAGE_RUNS * sum(map(_seconds, costs.ops[stage]))
        if time.perf_counter() > end_s:
            break
        try:
            stages.append((stage, trial_stage(call.graph, stage.start, stage.stop, bindings, device, call.autocast)))
        except Exception as failure:  # made-up data may be refused in any way
            _LOG.debug("operations %d to %d cannot be run as a stage: %s", stage.start, stage.stop, failure)
    return as_in_stages(costs, _timed(stages, device))


def _timed(stages: Sequence[tuple[slice, TrialStage]], device: torch.device) -> list[tuple[slice, float, float]]:
    try:
        seconds = stage_seconds([trial for _, trial in stages], device)
    except Exception as failure:  # in any way
        _LOG.debug("the model's stages cannot be run on made-up data: %s", failure)
        return []
    return [(stage, *times) for (stage, _), times in zip(stages, seconds, strict=True)]


def _stages_to_try(
    cut_allowed: Sequence[bool], ops: Sequence[MeasurableOp | None], costs: CostTable
) -> Iterator[slice]:
    """The operations in some stages of about equal time, as far as all of these fit into memory together."""
    least_s = max(sum(map(_seconds, costs.ops)) / _STAGES, _LEAST_STAGE_S)
    start, taken_s, held_bytes, states = 0, 0.0, 0, set[int]()
    for position, (op, cost) in enumerate(zip(ops, costs.ops, strict=True)):
        new = {r.storage: r.storage_bytes for r in (op.reads if op else ()) if r.role is OperandRole.STATE}
        held_bytes += cost.saved_bytes + sum(2 * new[storage] for storage in new.keys() - states)
        if held_bytes > _MOST_STAGES_BYTES:
            return
        states |= new.keys()
        taken_s += _seconds(cost)
        is_last = position + 1 == len(ops)
        if is_last or (cut_allowed[position + 1] and taken_s >= least_s):
            if taken_s >= _LEAST_STAGE_S:
                yield slice(start, position + 1)
            start, taken_s = position + 1, 0.0


def _seconds(op: OpCost) -> float:
    return op.forward_s + op.backward_s


def measured(
    ops: Sequence[MeasurableOp | None],
    plugin: PfeifePlugin,
    device: torch.device,
    *,
    budget_s: float,
    spec: DeviceSpec | None = None,
    is_kept: bool = True,
) -> CostTable:
    """`measure` with its progress shown; it knows what is kept in the cache folder, and keeps there what is new."""
    store = op_profiles(cache_folder(plugin), device)
    known = store.read()
    profiles = dict(known)
    with MeasuringProgress("measuring operations") if is_kept else nullcontext() as progress:
        costs = measure(ops, device, budget_s=budget_s, spec=spec, profiles=profiles, progress=progress)
    if is_kept:
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
