"""A pipelined model on one rank: captures calls, plans and places once, and runs what the conductor says.

Reads top to bottom like a step: `__call__` captures and returns deferred outputs (training) or values (evaluation);
`backward` and `resolve_leaf` are what the deferred outputs call back; `_run` executes one announced schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf
from pfeife_accelerate.capture.expression import Expression, extract
from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.model_capture import CapturedCall, ModelCapture, replay_tail
from pfeife_accelerate.capture.op_graph import follow, to_op_graph
from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.runtime.step import StepState
from pfeife_accelerate.session import caveats
from pfeife_accelerate.session.call import Call, Progress, promised
from pfeife_accelerate.session.conductor import Announcement
from pfeife_accelerate.session.exchange import exchange_scalars, share_values
from pfeife_accelerate.session.gradients import GradientBook
from pfeife_accelerate.session.loss_choice import LossChooser
from pfeife_accelerate.session.losses import MicrobatchLoss, whole_batch_loss
from pfeife_accelerate.session.outside import OutsideTensors
from pfeife_accelerate.session.placement import Placement
from pfeife_accelerate.session.planning import agree_on_plan, num_microbatches
from pfeife_accelerate.session.programs import ProgramCache, Run
from pfeife_accelerate.session.step_data import output_gradients, step_inputs
from pfeife_accelerate.session.unpipelined import CaptureGate

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session


class PipelinedModel:
    """One prepared model; `module` keeps its identity and its parameters' identity."""

    def __init__(
        self, session: Session, module: nn.Module, device: torch.device, autocast: tuple[str, torch.dtype] | None
    ) -> None:
        self.session = session
        self.module = module
        self.device = device
        self.autocast = autocast
        self.capture = ModelCapture(module, device, session.plugin.batch_dims)
        self.gate = CaptureGate(self)
        self.conductor = session.conductor
        self.loss_chooser = LossChooser()
        self.synchronises = True
        self.plan: PipelinePlan | None = None
        self.states: dict[str, torch.Tensor]
        self.placement: Placement
        self.programs: ProgramCache
        self.gradients: GradientBook
        self._cuts: dict[int, tuple[CapturedGraph, tuple[int, ...]]] = {}

    # -------------------------------------------------------------------------------------------- the script's calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `model(...)` does: deferred outputs if gradients are wanted, values otherwise."""
        self.session.service()
        training = torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters())
        captured = self.gate.capture(args, kwargs, training=training)
        if captured is None:
            return self.gate.run(args, kwargs)
        call = self._new_call(captured, training=training)
        if self.plan is None:
            self._plan(call)
        if self.session.mesh.world_rank == 0:
            caveats.tell(call, training=training)
        if training:
            return captured.outputs_with(self._deferred_outputs(call), half_to_float=self.autocast)
        self._evaluate(call)
        if call.alone:
            return self._run_alone(args, kwargs)
        values = self._tail_values(call)
        return captured.outputs_with(lambda i: values[call.graph.outputs[i]], half_to_float=self.autocast)

    def _new_call(self, captured: CapturedCall, *, training: bool) -> Call:
        call = Call(
            self.conductor.next_number(), self, captured.graph, captured.arguments, captured.bindings, self.autocast
        )
        self.session.batch_check.show(call)
        self.conductor.register(call, training=training)
        return call

    def _plan(self, call: Call) -> None:
        mesh = self.session.mesh
        plan = agree_on_plan(self.session.plugin, mesh, call, self.device)
        self.states = self.capture.states()
        self.placement = Placement(plan, self.states, mesh.rank)
        self.programs = ProgramCache(plan.spec, plan.stage_ranks, mesh.rank)
        self.gradients = GradientBook(self.placement)
        self._cuts[id(call.graph)] = (call.graph, plan.slicing.cuts)
        self.placement.apply(self.device, self.session.transport)
        self.session.optimizers.forget_elsewhere()
        self.plan = plan
        self.session.add(self)

    def cuts(self, call: Call) -> tuple[int, ...]:
        """Where this call's graph is cut: as planned, or so that the parameters can stay where they are."""
        assert self.plan is not None
        if id(call.graph) not in self._cuts:
            number = num_microbatches(self.session.plugin, call, self.session.mesh.pipeline_size)
            rows = max(1, call.batch_size // number)
            graph = to_op_graph(call.graph, call.micro_bindings(rows))
            found = follow(call.graph, graph, self.placement.stages_of, len(self.plan.stages))
            self._cuts[id(call.graph)] = (call.graph, found)
        return self._cuts[id(call.graph)][1]

    def _deferred_outputs(self, call: Call) -> Callable[[int], Any]:
        """Output by number. The model's own loss operations are recorded as if the script had written them."""
        graph = call.graph
        outputs = set(graph.results()) & graph.tail
        behind: set[str] = set()

        def leaf(name: str) -> DeferredTensor:
            behind.add(name)
            return call.deferred(name)

        tail = replay_tail(graph, call.arguments, call.bindings, leaf) if outputs else {}
        behind -= {node.name for node in graph.results() if node not in graph.tail}
        call.note_losses([tail[node] for node in outputs], behind)

        def output(index: int) -> Any:
            node = graph.outputs[index]
            return tail[node] if node in outputs else call.deferred(node.name)

        return output

    # -------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, call: Call) -> None:
        if self.conductor.leads:
            self.start(call, Run.EVALUATE)
        else:
            self.conductor.follow(call, Progress.DONE, self.session.run)

    def _tail_values(self, call: Call) -> Mapping[Any, Any]:
        with torch.no_grad():
            tail = replay_tail(call.graph, call.arguments, call.bindings, call.values.__getitem__)
        values = call.values
        return {n: tail[n] if n in call.graph.tail else values[n.name] for n in call.graph.results()}

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An evaluation that only this rank's script asks for: the whole model, fetched from the others."""
        from pfeife_accelerate.session.whole import whole_module  # that module is about models, this is one

        precision = torch.autocast(*self.autocast) if self.autocast else nullcontext()
        with whole_module(self) as module, precision:
            return module(*args, **kwargs)

    # -------------------------------------------------------------------------------------------- reading

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        """A leaf's whole-batch value on this rank; starts the forward half if nothing has run yet."""
        call = _call_of(leaf)
        if call.progress is Progress.PENDING:
            self.bring_forward(call)
        if leaf.value not in call.values:
            call.values[leaf.value] = self._fetch(call, leaf.value)
        return call.values[leaf.value]

    def bring_forward(self, call: Call) -> None:
        """Run the call's forward half now, or, on a following rank, whatever the conductor has decided on."""
        if self.conductor.leads:
            self.start(call, Run.FORWARD)
        else:
            self.conductor.demand(call)
            self.conductor.follow(call, Progress.FORWARDED, self.session.run)
            if call.alone:
                raise _lonely_training_call()

    def _fetch(self, call: Call, name: str) -> torch.Tensor:
        assert self.plan is not None
        ranks = self.plan.stage_ranks
        producer = ranks[call.staged.producer_of[name]] if name in call.staged.producer_of else ranks[-1]
        error: PfeifeError | None = None
        for rank in dict.fromkeys((producer, ranks[-1])):
            if rank == self.session.mesh.rank:
                continue
            try:
                return self.conductor.fetch(call, name, rank).to(self.device)
            except PfeifeError as failure:
                error = failure
        raise PfeifeError(
            id="PF504",
            what=f"the value {name!r} of an earlier step is no longer held by any rank",
            why="values that no variable of the script referred to when the step ran are freed with it",
            hints=("read it before the next step", "keep the output in a variable on every rank while the step runs"),
        ) from error

    # -------------------------------------------------------------------------------------------- backward

    def backward(self, loss: DeferredTensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
        """What `loss.backward()` does; afterwards every own parameter has its gradient."""
        expression = extract(loss)
        outside = OutsideTensors(expression)
        calls = list({id(leaf.call): _call_of(leaf) for leaf in expression.leaf_info}.values())
        if not all(call.differentiable for call in calls):
            raise _second_backward()
        for call in calls:
            call.asked = True
            self.conductor.open_calls.asked(call)
        if self.conductor.leads:
            self._lead_backward(expression, outside, calls, gradient)
        for call in calls:
            self.conductor.follow(call, Progress.DONE, self.session.run)
            call.resolver.gradients.release(call)
        outside.go_back(self.session)
        self._promise(expression, calls[-1])
        for model in {id(call.resolver): call.resolver for call in calls}.values():
            if model.synchronises and self.session.synchronises():
                model.gradients.synchronise(self.session)

    def _promise(self, expression: Expression, call: Call) -> None:
        scalars = call.scalars
        if scalars is None or len(scalars) != len(expression.scalars):
            raise InternalError(id="PF505", what="ranks of the pipeline recorded different losses in one step")
        for value, (_, record) in zip(scalars, expression.scalars, strict=True):
            if record.value is None and record.fake.numel() == 1:
                record.promise = promised(value, record)

    def _lead_backward(
        self, expression: Expression, outside: OutsideTensors, calls: list[Call], gradient: torch.Tensor | None
    ) -> None:
        loss_values = tuple(dict.fromkeys(leaf.value for leaf in expression.leaf_info))
        only = calls[0]
        if len(calls) == 1 and only.progress is Progress.PENDING and not self.conductor.demanded(only):
            number = num_microbatches(self.session.plugin, only, self.session.mesh.pipeline_size)
            choice = self.loss_chooser.choose(expression, only.batch_size, number)
            if choice.separable:
                loss = MicrobatchLoss(expression, outside.constants, choice.split, gradient)
                only.spare(record for _, record in expression.scalars)
                self.start(only, Run.PLANNED, loss_values, loss=loss)
                return
        self._exact_order(expression, outside, calls, gradient)

    def _exact_order(
        self, expression: Expression, outside: OutsideTensors, calls: list[Call], gradient: torch.Tensor | None
    ) -> None:
        """All forwards, the whole batch's loss, all backwards."""
        for call in calls:
            if call.progress is Progress.PENDING:
                call.resolver.start(call, Run.FORWARD)
        leaves = [_call_of(leaf).values[leaf.value] for leaf in expression.leaf_info]
        scalars, gradients = whole_batch_loss(expression, outside.constants, leaves, gradient)
        for call in reversed(calls):
            own = {
                leaf.value: g
                for leaf, g in zip(expression.leaf_info, gradients, strict=True)
                if leaf.call is call and g is not None
            }
            call.resolver.start(call, Run.BACKWARD, call.loss_values, gradients=own, scalars=scalars)

    # -------------------------------------------------------------------------------------------- running

    def start(self, call: Call, run: Run, loss_values: tuple[str, ...] = (), **loss: Any) -> None:
        """On the conductor: decide on a schedule, as soon as every rank's script has made the call."""
        self.conductor.gather(call, self.session.serve_demand)
        if call.state is None:
            self.session.batch_check.verify(call)
        wanted: tuple[str, ...] = ()
        match run:
            case Run.PLANNED | Run.FORWARD:
                wanted = tuple(sorted({*call.reachable(), *self.conductor.demanded(call)}))
            case Run.EVALUATE:
                wanted = call.graph.result_names()
        if run is Run.FORWARD:
            loss_values, wanted = wanted, ()  # the loss is yet to be written
        announcement = Announcement(run=run, call=call.number, loss_values=loss_values, wanted=wanted)
        self.conductor.announce(announcement)
        self._run(call, announcement, **loss)

    def run_announced(self, call: Call, announcement: Announcement) -> None:
        """Take part in a schedule that another rank started."""
        if announcement.run is Run.ALONE:
            call.alone, call.progress = True, Progress.DONE
            self.conductor.give_back(call)
            return
        self._run(call, announcement)

    @contextmanager
    def plain_forward(self) -> Iterator[None]:
        """The module with its own `forward`, as long as the context lasts."""
        ours, self.module.forward = self.module.forward, self.capture.original_forward
        try:
            yield
        finally:
            self.module.forward = ours

    def _run(
        self,
        call: Call,
        announcement: Announcement,
        *,
        loss: MicrobatchLoss | None = None,
        gradients: Mapping[str, torch.Tensor] | None = None,
        scalars: list[torch.Tensor] | None = None,
    ) -> None:
        """Take this rank's part in one announced schedule."""
        run = announcement.run
        number = num_microbatches(self.session.plugin, call, self.session.mesh.pipeline_size)
        needed = (*announcement.loss_values, *(n for n in announcement.wanted if n not in announcement.loss_values))
        if run is not Run.BACKWARD:
            call.staged = self.programs.staged(call.graph, self.cuts(call), needed)
            call.loss_values = announcement.loss_values
            call.state = StepState(number)
            call.inputs = step_inputs(self, call, number, training=run is not Run.EVALUATE)
        assert call.state is not None
        program = self.programs.program(call.staged, needed, call.loss_values, run, number)
        inputs = replace(call.inputs, loss=loss, gradients=output_gradients(call, gradients or {}))
        goes_back = run in (Run.PLANNED, Run.BACKWARD)
        with self.gradients.collecting(call, self.session) if goes_back else nullcontext():
            self.session.executor.run(program, inputs, call.state)
        self._keep(call)
        if goes_back:
            exchange_scalars(self.session, call, loss.totals() if loss is not None else scalars)
        if run is Run.EVALUATE:
            share_values(self.session, call, announcement.wanted)
        call.progress = Progress.FORWARDED if run is Run.FORWARD else Progress.DONE
        if call.progress is Progress.DONE:
            call.release()
            self.conductor.finished(call)
        self.session.control.advance_clock()

    def _keep(self, call: Call) -> None:
        assert call.state is not None
        for name, parts in call.state.kept.items():
            call.values[name] = call.whole(name, parts)
        call.state.kept.clear()


def _call_of(leaf: Leaf) -> Call:
    assert isinstance(leaf.call, Call)
    return leaf.call


def _lonely_training_call() -> PfeifeError:
    return PfeifeError(
        id="PF431",
        what="the model was called on one process of the pipeline only, with gradients enabled",
        why="the other processes of the pipeline have gone on to a barrier without making this call",
        hints=("call it under torch.no_grad() if it is an evaluation", "call it on all processes"),
    )


def _second_backward() -> PfeifeError:
    return PfeifeError(
        id="PF506",
        what="backward was called a second time through the same call of the model",
        why="the stages' graphs were freed by the first",
        hints=("add the losses and call backward once", "call the model again"),
    )
