"""A pipelined model on one rank: captures calls, plans and places once, and runs what the conductor says.

Reads top to bottom like a step: `__call__` captures and returns deferred outputs (training) or values (evaluation);
`backward` and `resolve_leaf` are what the deferred outputs call back; `_run` executes one announced schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf
from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.capture.model_capture import CapturedCall, ModelCapture
from pfeife_accelerate.capture.op_graph import stages_of_states
from pfeife_accelerate.capture.random_operation import own_generators
from pfeife_accelerate.compat_dynamo import forget_fakes
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups
from pfeife_accelerate.runtime.microbatch import divide
from pfeife_accelerate.runtime.process_memory import give_back_freed
from pfeife_accelerate.runtime.step import StepState
from pfeife_accelerate.session import caveats
from pfeife_accelerate.session.call import Call, Progress, lonely_training_call
from pfeife_accelerate.session.conductor import Announcement
from pfeife_accelerate.session.cuts import Cuts
from pfeife_accelerate.session.descent import backward, promise
from pfeife_accelerate.session.elsewhere import ValuesElsewhere
from pfeife_accelerate.session.exchange import exchange_scalars, share_input_gradients, share_values
from pfeife_accelerate.session.gradients import GradientBook
from pfeife_accelerate.session.guess import Foresight, Guess
from pfeife_accelerate.session.loss_choice import LossChooser
from pfeife_accelerate.session.losses import MicrobatchLoss
from pfeife_accelerate.session.numbers import MicrobatchNumber
from pfeife_accelerate.session.optimizer_cost import training_state
from pfeife_accelerate.session.outputs import deferred_outputs, output_values, refuse_loss_of_inputs
from pfeife_accelerate.session.own_gradients import OwnGradients
from pfeife_accelerate.session.peek import peek
from pfeife_accelerate.session.placement import Placement
from pfeife_accelerate.session.planning import agree_on_plan
from pfeife_accelerate.session.profiling import profile_and_leave
from pfeife_accelerate.session.programs import ProgramCache, Run
from pfeife_accelerate.session.randomness import return_seed, take_seed
from pfeife_accelerate.session.step_data import output_gradients, step_inputs
from pfeife_accelerate.session.surroundings import surroundings
from pfeife_accelerate.session.trial import affordable
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
        self.capture.peek = partial(peek, self)
        self.gate = CaptureGate(self)
        self.conductor = session.conductor
        self.loss_chooser = LossChooser(is_strict=session.plugin.on_loss_mismatch == "error")
        self.foresight = Foresight()
        self.synchronises = True
        self.plan: PipelinePlan | None = None
        self.states: dict[str, torch.Tensor]
        self.placement: Placement
        self.elsewhere: ValuesElsewhere
        self.microbatch_number: MicrobatchNumber
        self.programs: ProgramCache
        self.gradients: GradientBook
        self.own_gradients: OwnGradients
        self.cuts: Cuts

    # -------------------------------------------------------------------------------------------- the script's calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `model(...)` does: deferred outputs if gradients are wanted, values otherwise."""
        self.session.service()
        wants_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters())
        if self.plan is None and not self.gate.is_open and not self._all_make_it(wants_gradients):
            return self._run_alone(0, args, kwargs)
        precision = self._precision()
        captured = self.gate.capture(args, kwargs, precision, training=wants_gradients)
        if captured is None:
            return self.gate.run(args, kwargs)
        training = wants_gradients or bool(captured.links)
        call = self._new_call(captured, precision)
        if training and self.session.plugin.profile_file:
            profile_and_leave(self, call, self.session.plugin.profile_file)
        if self.plan is None:
            self._plan(call)
        self.session.batch_check.show(call)
        self.conductor.register(call, training=training)
        if self.session.mesh.world_rank == 0:
            caveats.tell(call, training=training)
        if training:
            return captured.outputs_with(deferred_outputs(call), half_to_float=self.autocast)
        self.evaluate(call)
        if call.alone:
            return self._run_alone(call.seed, args, kwargs)
        values = output_values(call)
        return captured.outputs_with(lambda i: values[call.graph.outputs[i]], half_to_float=self.autocast)

    def _precision(self) -> tuple[str, torch.dtype] | None:
        """The autocast to run in: Accelerate's, or else the one that the script has put around the call."""
        device = self.device.type
        if self.autocast is None and torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device)
        return self.autocast

    def _new_call(self, captured: CapturedCall, precision: tuple[str, torch.dtype] | None) -> Call:
        refuse_loss_of_inputs(captured)
        graph, arguments = captured.graph, captured.arguments
        number, links = self.conductor.next_number(), captured.links
        call = Call(number, self, graph, arguments, captured.bindings, precision, links, captured.versions)
        if call.graph.random_number:
            call.seed = take_seed()
        return call

    def _all_make_it(self, training: bool) -> bool:
        """Whether all ranks' scripts make this first call, which they capture and plan together."""
        session = self.session
        is_joint = self.conductor.meet(training=training, run=session.run, serve_demand=session.serve_demand)
        if training and not is_joint:
            raise lonely_training_call()
        return is_joint

    def _plan(self, call: Call) -> None:
        mesh, self.states = self.session.mesh, self.capture.states()
        kept = partial(training_state, self.session.optimizers.known, self.states)
        plan = agree_on_plan(self.session.plugin, mesh, self.session.transport, call, self.device, kept)
        plan = self.session.follow_plan(plan)
        self.placement = Placement(stages_of_states(call.graph, plan.cuts), plan.stage_ranks, self.states, mesh.rank)
        self.microbatch_number = MicrobatchNumber.planned(self.session.plugin, plan, call)
        self.programs = ProgramCache(plan.schedule, mesh.rank, plan.recompute, self.session.compilation)
        self.gradients = GradientBook(self.placement)
        self.own_gradients = OwnGradients(self.placement)
        self.cuts = Cuts(self, call.graph, plan)
        self.elsewhere = ValuesElsewhere(self)
        self.placement.apply(self.device, self.session.transport, self.elsewhere.give_up)
        self.session.optimizers.forget_elsewhere()
        self.plan = plan
        self.session.add(self)
        forget_fakes()
        give_back_freed()

    # -------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, call: Call) -> None:
        """Run the call's forwards alone, on all ranks."""
        if self.conductor.leads:
            self.start(call, Run.EVALUATE)
        else:
            self.conductor.follow(call, Progress.DONE, self.session.run)

    def _run_alone(self, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An evaluation that only this rank's script asks for: the whole model, fetched from the others."""
        from pfeife_accelerate.session.whole import whole_module  # that module is about models, this is one

        precision = torch.autocast(*self.autocast) if self.autocast else nullcontext()
        with whole_module(self) as module, precision, own_generators(seed, self.device):
            return module(*args, **kwargs)

    # -------------------------------------------------------------------------------------------- reading

    def bring(self, leaf: Leaf) -> None:
        """Run what the leaf's value needs, if nothing has run yet."""
        call = _call_of(leaf)
        if call.progress is Progress.PENDING and leaf.value not in call.values:
            self.bring_forward(call)

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        """A leaf's whole-batch value on this rank."""
        self.bring(leaf)
        call = _call_of(leaf)
        if leaf.value not in call.values:
            call.values[leaf.value] = self._fetch(call, leaf.value)
        return call.values[leaf.value]

    def bring_forward(self, call: Call, *, may_guess: bool = True) -> None:
        """Run the call's schedule, or its forward half, or, on a following rank, whatever the conductor decides on."""
        if self.conductor.leads:
            if not (may_guess and self._start_guessed(call)):
                self.start(call, Run.FORWARD, request=max(call.asked - 1, 0))
            return
        self.conductor.demand(call)
        self.conductor.follow(call, Progress.FORWARDED, self.session.run)
        if call.alone:
            raise lonely_training_call()
        prediction = self.foresight.predict(call) if call.guess is not None else None
        if prediction is not None and prediction.guess == call.guess and call.scalars is not None:
            promise(prediction.expression, call.scalars)

    def _start_guessed(self, call: Call) -> bool:
        """Run the planned schedule for what the script will differentiate, if that can be told."""
        prediction = self.foresight.predict(call) if call.asked == 0 else None
        if prediction is None:
            return False
        constants = list(prediction.expression.constants)
        return self.start_planned(call, prediction.expression, constants, None, guess=prediction.guess)

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

    # -------------------------------------------------------------------------------------------- running

    def backward(self, loss: DeferredTensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
        """What `loss.backward()` does; afterwards every own parameter has its gradient."""
        backward(self.session, loss, gradient, retain_graph)

    def start_planned(
        self,
        call: Call,
        expression: Expression,
        constants: list[torch.Tensor],
        gradient: torch.Tensor | None,
        guess: Guess | None = None,
    ) -> bool:
        """On the conductor: run the planned schedule, if the loss separates; whether its result is right."""
        number = self.microbatch_number.of(call)
        choice = self.loss_chooser.choose(expression, call.batch_size, number)
        if not choice.separable:
            return False
        is_new = choice.split is not None and self.loss_chooser.is_new(expression)
        if is_new and guess is not None:
            return False
        on_trial = is_new and affordable(expression, self.device)
        loss = MicrobatchLoss(expression, constants, choice.split, gradient, on_trial=on_trial)
        call.spare(record for _, record in expression.scalars)
        loss_values = tuple(dict.fromkeys(leaf.value for leaf in expression.leaf_info))
        request = max(call.asked - 1, 0)
        self.start(call, Run.PLANNED, loss_values, request=request, guess=guess, groups=choice.groups, loss=loss)
        if on_trial:
            self.loss_chooser.note_verdict(expression, is_right=call.progress is Progress.DONE)
        if guess is not None:
            promise(expression, call.scalars or ())
        return call.progress is Progress.DONE

    def start(
        self,
        call: Call,
        run: Run,
        loss_values: tuple[str, ...] = (),
        *,
        request: int = 0,
        guess: Guess | None = None,
        groups: RowGroups = CONTIGUOUS,
        **loss: Any,
    ) -> None:
        """On the conductor: decide on a schedule, as soon as every rank's script has made the call."""
        if not call.has_run:
            if not self.conductor.gather(call.number, self.session.serve_demand):
                if run is not Run.EVALUATE:
                    raise lonely_training_call()
                self._step_aside(call)
                return
            self.session.batch_check.verify(call)
        wanted: tuple[str, ...] = ()
        match run:
            case Run.PLANNED | Run.FORWARD:
                wanted = tuple(sorted({*call.reachable(), *self.conductor.demanded(call)}))
            case Run.EVALUATE:
                wanted = call.graph.result_names()
        if run is Run.FORWARD:
            loss_values, wanted = wanted, ()  # the loss is yet to be written
        announcement = Announcement(
            run=run,
            call=call.number,
            loss_values=loss_values,
            wanted=wanted,
            request=request,
            guess=guess,
            on_trial="loss" in loss and loss["loss"].on_trial,
            seed=call.seed,
            groups=groups,
        )
        self.conductor.announce(announcement)
        self._run(call, announcement, **loss)

    def run_announced(self, call: Call, announcement: Announcement) -> None:
        """Take part in a schedule that another rank started."""
        if announcement.run is Run.ALONE:
            self._step_aside(call)
        else:
            self._run(call, announcement)

    def _step_aside(self, call: Call) -> None:
        """This rank alone has made the call: it runs it by itself, and its number is another call's."""
        call.alone, call.progress = True, Progress.DONE
        if call.graph.random_number:
            return_seed()
        self.conductor.give_back(call)

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
        number = len(divide(call.batch_size, self.microbatch_number.of(call), announcement.groups))
        needed = (*announcement.loss_values, *(n for n in announcement.wanted if n not in announcement.loss_values))
        call.seed = announcement.seed
        if run is not Run.BACKWARD:
            call.begin(announcement.request, announcement.guess)
            self.own_gradients.forget(call.number)
            if run is not Run.EVALUATE:
                self.cuts.place(call)
            call.staged = self.programs.staged(call.graph, self.cuts.of(call), needed, self.cuts.copied(call))
            call.loss_values = announcement.loss_values
            call.state = StepState(number)
            call.inputs = step_inputs(self, call, number, announcement.groups, training=run is not Run.EVALUATE)
        assert call.state is not None
        program = self.programs.program(call.staged, needed, call.loss_values, run, number)
        inputs = replace(call.inputs, loss=loss, gradients=output_gradients(call, gradients or {}))
        with surroundings(self, call, announcement, program) as on_stage_done:
            self.session.execute(self, run, program, replace(inputs, on_stage_done=on_stage_done), call.state)
        call.keep(call.state.kept)
        call.state.kept.clear()
        is_right = True
        if run in (Run.PLANNED, Run.BACKWARD):
            share_input_gradients(self.session, call)
            is_right = loss is None or loss.is_right()
            is_right = exchange_scalars(self.session, call, loss.totals() if loss else scalars, is_right)
        if run is Run.EVALUATE:
            share_values(self.session, call, announcement.wanted)
        self._end(call, announcement, is_right)

    def _end(self, call: Call, announcement: Announcement, is_right: bool) -> None:
        call.has_run = True
        if not is_right:
            call.reopen(announcement.request)
        elif announcement.run is Run.FORWARD:
            call.progress = Progress.FORWARDED
        else:
            call.progress, call.answered = Progress.DONE, announcement.request + 1
            call.release()
            self.conductor.finished(call)
        self.session.tick()


def _call_of(leaf: Leaf) -> Call:
    assert isinstance(leaf.call, Call)
    return leaf.call
