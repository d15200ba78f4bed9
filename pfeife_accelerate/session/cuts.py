"""Where each graph of a model is cut: as planned, or so that the parameters can stay where they are.

Models: graphs of other lengths and modes, and graphs that read what the planned one does not: a head for another task,
a layer that was skipped. Once a call in training reads it, that is on its stages' ranks alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.op_graph import follow, stages_of_states, to_op_graph
from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.planning import num_microbatches

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel


class Cuts:
    """The cuts of one model's graphs; `planned` is the graph that the plan was made for."""

    def __init__(self, model: PipelinedModel, planned: CapturedGraph, plan: PipelinePlan) -> None:
        self._model = model
        self._num_stages = plan.num_stages
        self._made: dict[int, tuple[CapturedGraph, tuple[int, ...]]] = {id(planned): (planned, plan.cuts)}
        self._placed = {id(planned)}

    def of(self, call: Call) -> tuple[int, ...]:
        """The cuts of this call's graph."""
        if id(call.graph) not in self._made:
            session = self._model.session
            number = num_microbatches(session.plugin, call, session.mesh.pipeline_size)
            rows = max(1, call.batch_size // number)
            graph = to_op_graph(call.graph, call.micro_bindings(rows))
            found = follow(call.graph, graph, self._model.placement.stages_of, self._num_stages)
            self._made[id(call.graph)] = (call.graph, found)
        return self._made[id(call.graph)][1]

    def place(self, call: Call) -> None:
        """Before a call in training: give what only its graph reads a place."""
        cuts = self.of(call)
        if id(call.graph) in self._placed:
            return
        self._placed.add(id(call.graph))
        model = self._model
        if model.placement.add(stages_of_states(call.graph, cuts), model.elsewhere.give_up):
            model.gradients.note_placement()
            model.session.optimizers.forget_elsewhere()
