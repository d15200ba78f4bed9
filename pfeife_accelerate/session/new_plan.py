"""A new plan for a model: its operations measured, the machine as it is, and the planner asked.

Models: costs at each size of micro-batch that is tried; parameters with the state that the script's optimizers keep.
Ignores: other ranks, which get the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from pfeife_accelerate.capture.copied import copyable
from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.op_graph import to_op_graph
from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.cost.link_profile import LinkProfile
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import (
    CostGraph,
    CostTable,
    DeviceSpec,
    LinkSpec,
    Machine,
    OpGraph,
    PipelinePlan,
    cost_graph_of,
)
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.planner import SearchOptions, cuts_at, make_plan, pipeline_plan
from pfeife_accelerate.planner.describe import describe
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.measuring import machine_here
from pfeife_accelerate.session.numbers import candidates, fastest, rows_of

__all__ = ["TrainingState", "graph_of", "leanest", "new_plan", "search_options", "worth_copying"]

_LOG = get_logger(__name__)
_PLANNING_S = 30.0  #: for measuring at all sizes of micro-batches together, and planning
_SHORT_STEP_S = 0.1  #: of a step so short, the full search's seconds are won back after thousands of steps at best
_LONG_STEP_S = 0.5  #: of shorter ones, the memory is not worth further searches

_LEAST_SHARE = 0.45  #: of the fastest plan's memory; with less, no plan is about as fast
_SEARCHES = 3
_AS_FAST = 0.025  #: expected times that differ by less are equal

#: Bytes that training keeps of each parameter on a device, and seconds of its optimizer step.
TrainingState: TypeAlias = Callable[[DeviceSpec], Mapping[str, tuple[int, float]]]


def graph_of(call: Call, num_microbatches: int) -> OpGraph:
    """The graph of one micro-batch: what costs and fingerprints are of."""
    return to_op_graph(call.graph, call.micro_bindings(rows_of(call, num_microbatches)))


def new_plan(
    plugin: PfeifePlugin,
    mesh: PipelineMesh,
    call: Call,
    device: torch.device,
    links: LinkProfile | None,
    state: TrainingState,
    costs_of: Callable[[int, float], CostTable],
) -> PipelinePlan:
    """The fastest plan over the numbers of micro-batches that may be chosen, in full effort where steps are long.

    `costs_of(rows, seconds)` measures operations on micro-batches of so many rows, for so long at most.
    """
    machine = machine_here(mesh, device, links)
    spec = machine.device_of(0)
    kept = state(spec)
    options = search_options(plugin)
    links_used = {machine.link_of(a, b) for a in range(mesh.pipeline_size) for b in range(mesh.pipeline_size) if a != b}
    graphs: dict[int, tuple[OpGraph, CostGraph, tuple[int, ...]]] = {}

    def quick_plan(number: int, budget_s: float) -> PipelinePlan:
        ops = graph_of(call, number)
        costs = costs_of(rows_of(call, number), budget_s)
        copied = worth_copying(call.graph, ops, costs, links_used)
        graph = cost_graph_of(ops, costs, kept, copied=copied, bytes_per_s=spec.bytes_per_s)
        graphs[number] = ops, graph, copied
        return plan_for(number, "quick")

    def plan_for(number: int, effort: str, most_bytes: int | None = None) -> PipelinePlan:
        ops, graph, copied = graphs[number]
        wanted = replace(options, effort=effort)
        if options.split_points:
            loops = options.num_loops or max(1, (len(options.split_points) + 1) // mesh.pipeline_size)
            wanted = replace(wanted, cuts=cuts_at(ops, options.split_points, mesh.pipeline_size * loops))
        limited = machine if most_bytes is None else _limited(machine, most_bytes / wanted.memory_fraction)
        planned = make_plan(graph, limited, mesh.pipeline_size, number, wanted)
        return pipeline_plan(planned, ops, machine, copied)

    chosen = fastest(quick_plan, candidates(plugin, call, mesh.pipeline_size), _PLANNING_S)
    # The quick plan is a few per cent slower.
    if chosen.estimate_s < _SHORT_STEP_S:
        plan = chosen
    else:
        full_plan = partial(plan_for, chosen.spec.num_microbatches, "full")
        plan = full_plan()
        if plan.estimate_s >= _LONG_STEP_S:
            plan = leanest(full_plan, plan)
    _LOG.info("plan\n%s", describe(plan))
    return plan


def leanest(plan_within: Callable[[int], PipelinePlan], fastest_plan: PipelinePlan) -> PipelinePlan:
    """Of plans that are about as fast as the fastest, one that needs little memory, found by halving what is in doubt.

    `plan_within(bytes)` plans with that much memory on each rank. What is won by more of it is soon less than what
    steps differ by, and plans for less have fewer stages, whose host time is never all foreseen.
    """
    lean, most_bytes = fastest_plan, max(fastest_plan.peak_bytes)
    too_little_bytes, enough_bytes = int(_LEAST_SHARE * most_bytes), most_bytes
    for _ in range(_SEARCHES):
        if too_little_bytes >= enough_bytes:
            break
        tried_bytes = (too_little_bytes + enough_bytes) // 2
        try:
            plan = plan_within(tried_bytes)
        except PfeifeError as error:
            if error.id != "PF302":
                raise
            too_little_bytes = tried_bytes  # nothing fits
            continue
        if plan.estimate_s <= fastest_plan.estimate_s * (1 + _AS_FAST):
            lean, enough_bytes = plan, max(plan.peak_bytes)
        else:
            too_little_bytes = tried_bytes
    return lean


def _limited(machine: Machine, memory_bytes: float) -> Machine:
    least = (min(device.memory_bytes, int(memory_bytes)) for device in machine.devices)
    devices = (replace(device, memory_bytes=most) for device, most in zip(machine.devices, least, strict=True))
    return replace(machine, devices=tuple(devices))


def worth_copying(graph: CapturedGraph, ops: OpGraph, costs: CostTable, links: Collection[LinkSpec]) -> tuple[int, ...]:
    """Operations whose value is sooner computed anew, with all that it is made of, than sent over any of the links."""
    found = []
    for node, made_by in copyable(graph).items():
        index = graph.position[node]
        num_bytes = ops.nodes[index].num_bytes
        seconds = sum(costs.ops[graph.position[part]].forward_s for part in made_by)
        if links and seconds < min(link.transfer_s(num_bytes) for link in links):
            found.append(index)
    return tuple(found)


def search_options(plugin: PfeifePlugin) -> SearchOptions:
    """What the user fixes about the plan."""
    return SearchOptions(
        num_microbatches=plugin.num_microbatches,
        schedule=plugin.schedule,
        num_loops=plugin.num_loops,
        microbatches_per_loop=plugin.microbatches_per_loop,
        prefetch_forwards=plugin.prefetch_forwards,
        split_points=plugin.split_points,
        backward=plugin.backward,
        recompute=plugin.recompute,
    )
