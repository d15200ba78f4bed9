"""Where each graph of a model is cut: as planned, or so that the parameters can stay where they are.

Models: graphs of other lengths and modes, and graphs that read what the planned one does not: a head for another task,
a layer that was skipped. Once a call in training reads it, that is on its stages' ranks alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pfeife_accelerate.capture.copied import alike, copyable
from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.op_graph import follow, stages_of_states, to_op_graph
from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.session.call import Call

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel


class Cuts:
    """The cuts of one model's graphs; `planned` is the graph that the plan was made for."""

    def __init__(self, model: PipelinedModel, planned: CapturedGraph, plan: PipelinePlan) -> None:
        self._model = model
        self._num_stages = plan.num_stages
        self._made: dict[int, tuple[CapturedGraph, tuple[int, ...]]] = {id(planned): (planned, plan.cuts)}
        self._placed = {id(planned)}
        self._planned = planned
        # A buffer may have an operation's name; the operation is then called otherwise in the plan.
        self._planned_copies = tuple(name.removesuffix("'") for name in plan.copied_values)
        self._changed: frozenset[str] = frozenset()
        self._copied: dict[tuple[int, frozenset[str]], tuple[str, ...]] = {}

    def of(self, call: Call) -> tuple[int, ...]:
        """The cuts of this call's graph."""
        if id(call.graph) not in self._made:
            rows = max(1, call.batch_size // self._model.microbatch_number.of(call))
            graph = to_op_graph(call.graph, call.micro_bindings(rows))
            found = follow(call.graph, graph, self._model.placement.stages_of, self._num_stages)
            self._made[id(call.graph)] = (call.graph, found)
        return self._made[id(call.graph)][1]

    def copied(self, call: Call) -> tuple[str, ...]:
        """The values of this call's graph that each reading stage computes anew.

        A buffer that a call has changed is right where that ran, and no longer everywhere.
        """
        graph = call.graph
        self._changed |= frozenset(graph.updated_buffers)
        key = id(graph), self._changed
        if key not in self._copied:
            is_planned = graph is self._planned
            names = self._planned_copies if is_planned else alike(self._planned, self._planned_copies, graph)
            possible = {node.name for node in copyable(graph, self._changed)} if names else set()
            self._copied[key] = tuple(name for name in names if name in possible)
        return self._copied[key]

    def place(self, call: Call) -> None:
        """Before a call in training: give what only its graph reads a place."""
        cuts = self.of(call)
        if id(call.graph) in self._placed:
            return
        self._placed.add(id(call.graph))
        model = self._model
        if model.placement.add(stages_of_states(call.graph, cuts), model.elsewhere.give_up):
            model.gradients.replicas.note_placement()
            model.session.optimizers.forget_elsewhere()
