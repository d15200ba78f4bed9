"""Profile, plan, agree: what happens once, at the first call of a model.

All ranks measure the links between them, unless that has been done before; world rank 0 measures the operations and
plans; every rank gets the plan as JSON and checks that its own graph has the plan's fingerprint.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from pfeife_accelerate.capture.op_graph import to_op_graph
from pfeife_accelerate.config import PfeifePlugin, cache_folder
from pfeife_accelerate.cost.link_profile import LinkProfile
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import OpGraph, PipelinePlan, from_json, to_json
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.planner.describe import describe
from pfeife_accelerate.planner.search import SearchOptions, make_plan
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.runtime.microbatch import divide
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.links import agree_on_links
from pfeife_accelerate.session.measuring import machine_here, measured_costs

_LOG = get_logger(__name__)


def num_microbatches(plugin: PfeifePlugin, call: Call, num_ranks: int) -> int:
    """How many micro-batches this call's batch is divided into."""
    if call.graph.refusal is not None:
        return 1
    wanted = plugin.num_microbatches or 2 * num_ranks
    # BatchNorm in training mode has no statistics of a single row.
    most = call.batch_size // 2 if call.graph.has_batch_statistics else call.batch_size
    return max(1, min(wanted, most))


def agree_on_plan(plugin: PfeifePlugin, mesh: PipelineMesh, call: Call, device: torch.device) -> PipelinePlan:
    """The plan that all ranks of the launch will follow.

    Raises: PfeifeError PF222 if a rank captured another model, and the planner's own errors.
    """
    number = num_microbatches(plugin, call, mesh.pipeline_size)
    rows = divide(call.batch_size, number)[0].count
    graph = to_op_graph(call.graph, call.micro_bindings(rows))
    text = ""
    plan = _stored_plan(plugin, graph) if mesh.world_rank == 0 else None
    links = agree_on_links(mesh, device, cache_folder(plugin), is_wanted=plan is None)
    if mesh.world_rank == 0:
        plan = plan or _new_plan(plugin, mesh, call, graph, number, device, links)
        text = to_json(plan)
        if plugin.plan_file and not Path(plugin.plan_file).exists():
            Path(plugin.plan_file).write_text(text)
    plan = from_json(_broadcast_text(text, mesh))
    if plan.graph_fingerprint != graph.fingerprint:
        raise PfeifeError(
            id="PF222",
            what=f"rank {mesh.world_rank} captured another graph of the model than rank 0",
            why="the script builds the model, or its first batch, differently from process to process",
            hints=("build the model alike on all processes", "give the first batch the same shape on all pipelines"),
        )
    return plan


def _stored_plan(plugin: PfeifePlugin, graph: OpGraph) -> PipelinePlan | None:
    path = Path(plugin.plan_file) if plugin.plan_file else None
    if path is None or not path.exists():
        return None
    plan = from_json(path.read_text())
    if plan.graph_fingerprint != graph.fingerprint:
        raise PfeifeError(
            id="PF223",
            what=f"the plan in {path} was made for another model, batch size or version",
            where=f"plan_file: {path}",
            why="its fingerprint differs from that of the captured graph",
            hints=("remove the file: a new plan is made and stored there",),
        )
    return plan


def _new_plan(
    plugin: PfeifePlugin,
    mesh: PipelineMesh,
    call: Call,
    graph: OpGraph,
    number: int,
    device: torch.device,
    links: LinkProfile | None,
) -> PipelinePlan:
    costs = measured_costs(plugin, call, divide(call.batch_size, number)[0].count, device)
    machine = machine_here(mesh, device, links)
    options = SearchOptions(
        num_microbatches=number,
        schedule=plugin.schedule,
        num_loops=plugin.num_loops,
        microbatches_per_loop=plugin.microbatches_per_loop,
        prefetch_forwards=plugin.prefetch_forwards,
        split_points=plugin.split_points,
    )
    plan = make_plan(graph, costs, machine, mesh.pipeline_size, number, options)
    _LOG.info("plan\n%s", describe(plan))
    return plan


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
