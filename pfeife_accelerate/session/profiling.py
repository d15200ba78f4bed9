"""Measure instead of train: the costs of the script's own model, batch and optimizer, in a file, and the script's end.

Models: all ranks measure the links, world rank 0 the operations; then all leave together, with exit code 0.
Ignores: scripts that catch `SystemExit`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pfeife_accelerate.capture.op_graph import to_op_graph
from pfeife_accelerate.config import cache_folder
from pfeife_accelerate.ir import cost_graph_of, write_cost_file
from pfeife_accelerate.session import lifecycle
from pfeife_accelerate.session.links import agree_on_links
from pfeife_accelerate.session.measuring import machine_here, measured_costs
from pfeife_accelerate.session.numbers import candidates, rows_of
from pfeife_accelerate.session.optimizer_cost import training_state

if TYPE_CHECKING:
    from pfeife_accelerate.session.call import Call
    from pfeife_accelerate.session.model import PipelinedModel


def profile_and_leave(model: PipelinedModel, call: Call, file: str) -> NoReturn:
    """Write the cost file of this training call and end the script; every rank of the launch calls it."""
    session = model.session
    plugin, mesh = session.plugin, session.mesh
    links = agree_on_links(mesh, model.session.transport, model.device, cache_folder(plugin))
    if mesh.world_rank == 0:
        rows = rows_of(call, candidates(plugin, call, mesh.pipeline_size)[0])
        graph = to_op_graph(call.graph, call.micro_bindings(rows))
        costs = measured_costs(plugin, call, rows, model.device)
        machine = machine_here(mesh, model.device, links)
        device = machine.device_of(0)
        state = training_state(session.optimizers.known, model.capture.states(), device)
        name = type(model.module).__name__
        costed = cost_graph_of(graph, costs, state, name=name, bytes_per_s=device.bytes_per_s)
        write_cost_file(Path(file), costed, machine)
    lifecycle.stop()
    raise SystemExit(0)
