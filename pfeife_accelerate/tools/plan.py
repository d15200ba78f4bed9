"""`pfeife plan`: from a cost graph or a model's name to a plan, printed and written as JSON.

Models: the whole way for models of any size, on fake tensors. Ignores: measuring; `pfeife profile` does that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from rich.console import Console
from rich.text import Text

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, Machine, OpGraph, read_cost_file
from pfeife_accelerate.planner.pipeline_plan import pipeline_plan
from pfeife_accelerate.planner.planned import Planned
from pfeife_accelerate.tools.plan_choice import Choice, Search, Shape, choose, shapes
from pfeife_accelerate.tools.plan_file import check_folder, write_plan
from pfeife_accelerate.tools.plan_report import print_attempts, print_plan
from pfeife_accelerate.tools.plan_request import DTYPES, PlanRequest

__all__ = ["plan"]

#: Gives the `Search` on a machine that a request asks for.
Searcher = Callable[[PlanRequest, Machine], Search]


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is planned: costs by rows of a micro-batch, the operations where their names are known, what is tried."""

    name: str
    graph_of: Callable[[int], CostGraph]
    ops_of: Callable[[int], OpGraph | None]
    shapes: tuple[Shape, ...]
    machine: Machine


def plan(options: argparse.Namespace, *, searcher: Searcher | None = None) -> int:
    """Plan, print, write; gives the exit code. `searcher` stands in for the planner."""
    request = PlanRequest.of(options)
    if request.out is not None:
        check_folder(request.out)
    console = Console()
    with console.status("reading the model" if request.model else "reading the graph") as status:
        subject = _of_file(request) if request.graph else _of_model(request)
        search = (searcher or _searcher)(request, subject.machine)
        choice = choose(
            subject.shapes,
            subject.graph_of,
            search,
            subject.machine,
            request.num_ranks,
            effort=request.effort,
            tell=lambda shape: status.update(f"planning {shape}"),
        )
    _report(console, request, subject, choice)
    if request.out is not None:
        ops = subject.ops_of(choice.shape.rows)
        write_plan(request.out, pipeline_plan(choice.planned, ops, subject.machine))
        console.print(Text(f"written to {request.out}"), soft_wrap=True)
    return 0


def _of_file(request: PlanRequest) -> _Subject:
    assert request.graph is not None and request.num_microbatches is not None
    graph, machine = read_cost_file(request.graph)
    only = Shape(num_replicas=1, num_microbatches=request.num_microbatches, rows=1)
    return _Subject(
        name=graph.name,
        graph_of=lambda _: graph,
        ops_of=lambda _: None,
        shapes=(only,),
        machine=_with_memory(machine, request.memory_bytes),
    )


def _of_model(request: PlanRequest) -> _Subject:
    # Imported here: a graph from a file needs neither torch nor the models' libraries.
    import torch

    from pfeife_accelerate.cost.catalogue import machine as machine_called
    from pfeife_accelerate.tools.models import ModelledModel, ModelOptions, resolve

    assert request.model is not None and request.machine is not None
    machine = machine_called(request.machine, request.num_ranks, ranks_per_host=request.ranks_per_host)
    machine = _with_memory(machine, request.memory_bytes)
    dtype: torch.dtype = vars(torch)[DTYPES[request.dtype]]
    overrides = dict(request.overrides)
    model = ModelledModel(
        resolve(
            request.model,
            ModelOptions(dtype=dtype, seq=request.seq, resolution=request.resolution, overrides=overrides),
        )
    )
    found = shapes(
        batch=request.batch,
        num_ranks=request.num_ranks,
        num_microbatches=request.num_microbatches,
        num_replicas=request.num_replicas,
        least_rows=model.least_rows,
    )
    few = [shape for shape in found if shape.rows < model.least_rows]
    if few and request.num_microbatches is not None:
        raise PfeifeError(
            id="PF144",
            what=f"micro-batches of {few[0].rows} row(s) are too small for {model.name}",
            why="BatchNorm in training mode has no statistics of a single row",
            hints=(f"--microbatches {request.batch // model.least_rows} or fewer",),
        )
    return _Subject(
        name=f"{model.name}, {model.num_parameters / 1e6:.1f} M parameters in {request.dtype}",
        graph_of=cache(lambda rows: model.cost_graph(rows, machine.device_of(0))),
        ops_of=model.op_graph,
        shapes=found,
        machine=machine,
    )


def _with_memory(machine: Machine, memory_bytes: int | None) -> Machine:
    if memory_bytes is None:
        return machine
    return replace(machine, devices=tuple(replace(device, memory_bytes=memory_bytes) for device in machine.devices))


def _searcher(request: PlanRequest, machine: Machine) -> Search:
    from pfeife_accelerate.planner import SearchOptions, make_plan

    def search(graph: CostGraph, num_ranks: int, num_microbatches: int, effort: str) -> Planned:
        options = SearchOptions(
            schedule=request.schedule,
            memory_fraction=request.memory_fraction,
            backward=request.backward,
            recompute=request.recompute,
            effort=effort,
        )
        return make_plan(graph, machine, num_ranks, num_microbatches, options)

    return search


def _report(console: Console, request: PlanRequest, subject: _Subject, choice: Choice) -> None:
    shape = choice.shape
    pieces = str(shape) if request.model else f"{shape.num_microbatches} micro-batches"
    name = subject.machine.device_of(0).name
    kind = "" if name == "device" else f" of {name}"  # a cost file need not say
    console.print(Text(f"{subject.name}: {request.num_ranks} ranks{kind}, {pieces}"), soft_wrap=True)
    print_plan(console, choice.planned, choice.graph, all_reduce_s=choice.all_reduce_s)
    print_attempts(console, choice.attempts, shape)
    if request.model:
        pipeline = request.num_ranks // shape.num_replicas
        options = f"options      pipeline_size: {pipeline}, num_microbatches: {shape.num_microbatches}"
        console.print(Text(options), soft_wrap=True)
