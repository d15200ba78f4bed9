"""Profile, plan, agree: what happens once, at the first call of a model.

World rank 0 measures the operations and plans, or finds a plan that was made before; every rank gets the plan as JSON
and checks that its own graph has the plan's fingerprint.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.op_graph import to_op_graph
from pfeife_accelerate.config import PfeifePlugin, cache_folder
from pfeife_accelerate.cost.hardware import device_spec, link_spec
from pfeife_accelerate.cost.op_profile import OpProfile, measure
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostTable, Machine, OpCost, OpGraph, PipelinePlan, from_json, to_json
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.planner.describe import describe
from pfeife_accelerate.planner.search import SearchOptions, make_plan
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.schedule import chain_messages, lower
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.numbers import candidates, fastest, rows_of
from pfeife_accelerate.session.plan_cache import PlanCache, write_plan

_LOG = get_logger(__name__)
_PLANNING_S = 30.0  #: for measuring at all sizes of micro-batches together, and planning


def agree_on_plan(plugin: PfeifePlugin, mesh: PipelineMesh, call: Call, device: torch.device) -> PipelinePlan:
    """The plan that all ranks of the launch will follow.

    Raises: PfeifeError PF222 if a rank captured another model, and the planner's own errors.
    """
    text = ""
    if mesh.world_rank == 0:
        plan = _stored_plan(plugin, mesh, call) or _kept_or_new_plan(plugin, mesh, call, device)
        text = to_json(plan)
        if plugin.plan_file and not Path(plugin.plan_file).exists():
            write_plan(Path(plugin.plan_file), plan)
    plan = from_json(_broadcast_text(text, mesh))
    if plan.graph_fingerprint != _graph(call, plan.spec.num_microbatches).fingerprint:
        raise PfeifeError(
            id="PF222",
            what=f"rank {mesh.world_rank} captured another graph of the model than rank 0",
            why="the script builds the model, or its first batch, differently from process to process",
            hints=("build the model alike on all processes", "give the first batch the same shape on all pipelines"),
        )
    return plan


def _graph(call: Call, num_microbatches: int) -> OpGraph:
    """The graph of one micro-batch: what costs and fingerprints are of."""
    return to_op_graph(call.graph, call.micro_bindings(rows_of(call, num_microbatches)))


# -- plans made before -------------------------------------------------------------------------------------------------


def _stored_plan(plugin: PfeifePlugin, mesh: PipelineMesh, call: Call) -> PipelinePlan | None:
    path = Path(plugin.plan_file) if plugin.plan_file else None
    if path is None or not path.exists():
        return None
    plan = from_json(path.read_text())
    _check(mesh, call, path, plan)
    return plan


def _kept_or_new_plan(plugin: PfeifePlugin, mesh: PipelineMesh, call: Call, device: torch.device) -> PipelinePlan:
    if not plugin.plan_cache:
        return _new_plan(plugin, mesh, call, device)
    cache = PlanCache(cache_folder(plugin) / "plans", _question(plugin, mesh, call, device))
    plan = cache.read(partial(_check, mesh, call, cache.path))
    if plan is None:
        plan = _new_plan(plugin, mesh, call, device)
        cache.write(plan)
    return plan


def _question(plugin: PfeifePlugin, mesh: PipelineMesh, call: Call, device: torch.device) -> dict[str, str | int]:
    """All that a plan depends on, but for the moment at which costs are measured."""
    return {
        "graph": _graph(call, 1).fingerprint,  # of the whole batch: the number of micro-batches may be the plan's
        "rows": call.batch_size,
        "autocast": str(call.autocast),
        "options": str(_search_options(plugin)),
        "ranks": mesh.pipeline_size,
        "processes": mesh.shape.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "package": version("pfeife_accelerate"),
    }


def _check(mesh: PipelineMesh, call: Call, path: Path, plan: PipelinePlan) -> None:
    """Raise unless the plan is one for this call's graph and this many ranks, and its order can run."""
    graph = _graph(call, plan.spec.num_microbatches)
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
    lower(plan.schedule, chain_messages(plan.stage_ranks))


# -- new plans ---------------------------------------------------------------------------------------------------------


def _new_plan(plugin: PfeifePlugin, mesh: PipelineMesh, call: Call, device: torch.device) -> PipelinePlan:
    """The fastest plan over the numbers of micro-batches that may be chosen."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    machine = Machine(devices=(device_spec(device, local_ranks=mesh.world_size),), link=link_spec(backend))
    profiles: dict[str, OpProfile] = {}

    def plan_for(number: int, budget_s: float) -> PipelinePlan:
        costs = CostTable(ops=_costs(call, number, device, profiles, budget_s))
        return make_plan(_graph(call, number), costs, machine, mesh.pipeline_size, number, _search_options(plugin))

    plan = fastest(plan_for, candidates(plugin, call, mesh.pipeline_size), _PLANNING_S)
    _LOG.info("plan\n%s", describe(plan))
    return plan


def _costs(
    call: Call, number: int, device: torch.device, profiles: MutableMapping[str, OpProfile], budget_s: float
) -> tuple[OpCost, ...]:
    """What each operation costs on one of that many micro-batches; `profiles` are shared between the numbers."""
    bindings = call.micro_bindings(rows_of(call, number))
    ops = measurable_ops(call.graph, bindings, device, autocast=call.autocast)
    return measure(ops, device, budget_s=budget_s, profiles=profiles)


def _search_options(plugin: PfeifePlugin) -> SearchOptions:
    return SearchOptions(
        num_microbatches=plugin.num_microbatches,
        schedule=plugin.schedule,
        num_loops=plugin.num_loops,
        microbatches_per_loop=plugin.microbatches_per_loop,
        prefetch_forwards=plugin.prefetch_forwards,
        split_points=plugin.split_points,
    )


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
