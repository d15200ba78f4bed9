"""Agree on a plan: what happens once, at the first call of a model.

World rank 0 finds a plan that was made before, or all ranks measure the links between them, unless that has been done,
and world rank 0 makes a new one, for which all ranks measure operations at the same time and its own times count; every
rank gets the plan as JSON and checks that its own graph has its fingerprint.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from pfeife_accelerate.capture.copied import copyable
from pfeife_accelerate.config import PfeifePlugin, cache_folder
from pfeife_accelerate.cost.store import FORMAT
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostTable, DeviceSpec, PipelinePlan, from_json, to_json
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.runtime.transport import AbstractTransport
from pfeife_accelerate.schedule import lower, messages_between
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.links import agree_on_links
from pfeife_accelerate.session.measuring import measured_costs
from pfeife_accelerate.session.new_plan import TrainingState, graph_of, new_plan, search_options
from pfeife_accelerate.session.plan_cache import PlanCache, write_plan

_LOG = get_logger(__name__)
_COSTING = 3  #: how costs follow from what is measured: plans of another way are made anew
_MEASURE = "measure "  #: then the rows of a micro-batch, and seconds
#: Asked for the bytes of optimizer states alone: their seconds do not count.
_NO_DEVICE = DeviceSpec(name="", memory_bytes=0, flops_per_s=(), bytes_per_s=1.0, launch_s=0.0)


def agree_on_plan(
    plugin: PfeifePlugin,
    mesh: PipelineMesh,
    transport: AbstractTransport,
    call: Call,
    device: torch.device,
    state: TrainingState,
) -> PipelinePlan:
    """The plan that all ranks of the launch will follow; `state` tells what training keeps of each parameter.

    Raises: PfeifeError PF222 if a rank captured another model, and the planner's own errors.
    """
    plan, cache = None, None
    if mesh.world_rank == 0:
        plan = _stored_plan(plugin, mesh, call)
        if plan is None and plugin.plan_cache:
            cache = PlanCache(cache_folder(plugin) / "plans", _question(plugin, mesh, call, device, state))
            plan = cache.read(partial(_check, mesh, call, cache.path))
    links = agree_on_links(mesh, transport, device, cache_folder(plugin), is_wanted=plan is None)
    text = ""
    if mesh.world_rank == 0:
        if plan is None:
            costs_of = partial(_costs_where_all_are_busy, plugin, mesh, call, device)
            plan = new_plan(plugin, mesh, call, device, links, state, costs_of)
            if cache is not None:
                cache.write(plan)
        text = to_json(plan)
        if plugin.plan_file and not Path(plugin.plan_file).exists():
            write_plan(Path(plugin.plan_file), plan)
    text = _broadcast_text(text, mesh)
    while text.startswith(_MEASURE):
        rows, budget_s = text.removeprefix(_MEASURE).split()
        _measure_along(plugin, call, device, int(rows), float(budget_s))
        text = _broadcast_text("", mesh)
    plan = from_json(text)
    if plan.graph_fingerprint != graph_of(call, plan.spec.num_microbatches).fingerprint:
        raise PfeifeError(
            id="PF222",
            what=f"rank {mesh.world_rank} captured another graph of the model than rank 0",
            why="the script builds the model, or its first batch, differently from process to process",
            hints=("build the model alike on all processes", "give the first batch the same shape on all pipelines"),
        )
    return plan


# -- plans made before -------------------------------------------------------------------------------------------------


def _stored_plan(plugin: PfeifePlugin, mesh: PipelineMesh, call: Call) -> PipelinePlan | None:
    path = Path(plugin.plan_file) if plugin.plan_file else None
    if path is None or not path.exists():
        return None
    plan = from_json(path.read_text())
    _check(mesh, call, path, plan)
    return plan


def _question(
    plugin: PfeifePlugin, mesh: PipelineMesh, call: Call, device: torch.device, state: TrainingState
) -> dict[str, str | int]:
    """All that a plan depends on, but for the moment at which costs are measured."""
    return {
        "graph": graph_of(call, 1).fingerprint,  # of the whole batch: the number of micro-batches may be the plan's
        "rows": call.batch_size,
        "autocast": str(call.autocast),
        "options": str(search_options(plugin)),
        "kept": sum(num_bytes for num_bytes, _ in state(_NO_DEVICE).values()),
        "ranks": mesh.pipeline_size,
        "processes": mesh.shape.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "package": version("pfeife_accelerate"),
        "costs": f"{FORMAT}.{_COSTING}",
    }


def _check(mesh: PipelineMesh, call: Call, path: Path, plan: PipelinePlan) -> None:
    """Raise unless the plan is one for this call's graph and this many ranks, and its order can run."""
    graph = graph_of(call, plan.spec.num_microbatches)
    if plan.graph_fingerprint != graph.fingerprint:
        raise PfeifeError(
            id="PF223",
            what=f"the plan in {path} was made for another model, batch size or version",
            where=f"plan_file: {path}",
            why="its fingerprint differs from that of the captured graph",
            hints=("remove the file: a new plan is made and stored there",),
        )
    if plan.num_ranks != mesh.pipeline_size:
        raise PfeifeError(
            id="PF223",
            what=f"the plan in {path} was made for {plan.num_ranks} ranks, not for {mesh.pipeline_size}",
            where=f"plan_file: {path}",
            hints=(f"pipeline_size: {plan.num_ranks}", "remove the file: a new plan is made and stored there"),
        )
    bounds = (0, *plan.cuts, len(graph.nodes))
    wrong = [cut for cut in plan.cuts if not (0 < cut < len(graph.nodes) and graph.nodes[cut].cut_allowed)]
    if wrong or any(first >= last for first, last in pairwise(bounds)):
        raise PfeifeError(
            id="PF224",
            what=f"the plan in {path} cuts the graph's {len(graph.nodes)} operations at {list(plan.cuts)}",
            where=f"plan_file: {path}",
            why=f"no cut is possible at {wrong}" if wrong else "each stage needs an operation",
        )
    possible = {node.name for node in copyable(call.graph)}
    if impossible := [name for name in plan.copied_values if name.removesuffix("'") not in possible]:
        raise PfeifeError(
            id="PF174",
            what=f"the plan in {path} has each stage compute {impossible[0]!r} anew",
            where=f"plan_file: {path}",
            why="it needs a gradient, reads parameters, draws random numbers, is changed in place, or is not there",
            hints=('leave it out of "copied_values"',),
        )
    values = ((edge.producer, edge.consumers, edge.spec.requires_grad) for edge in plan.edges)
    lower(plan.schedule, messages_between(values, plan.stage_ranks))


# -- new plans ---------------------------------------------------------------------------------------------------------


def _costs_where_all_are_busy(
    plugin: PfeifePlugin, mesh: PipelineMesh, call: Call, device: torch.device, rows: int, budget_s: float
) -> CostTable:
    """`measured_costs` of world rank 0 while all ranks measure the same: as in a step, none has the host to itself."""
    _broadcast_text(f"{_MEASURE}{rows} {budget_s}", mesh)
    return measured_costs(plugin, call, rows, device, budget_s=budget_s)


def _measure_along(plugin: PfeifePlugin, call: Call, device: torch.device, rows: int, budget_s: float) -> None:
    try:
        measured_costs(plugin, call, rows, device, budget_s=budget_s, is_shown=False)
    except Exception as failure:  # rank 0 goes on, and these times do not count
        _LOG.debug("this rank cannot measure along: %s", failure)


# -- agreement ---------------------------------------------------------------------------------------------------------


def _broadcast_text(text: str, mesh: PipelineMesh) -> str:
    """World rank 0's text on every rank (bytes in a tensor: nothing is unpickled)."""
    group = mesh.world_control_group
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=0)
    if mesh.world_rank != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return bytes(data.tolist()).decode()
