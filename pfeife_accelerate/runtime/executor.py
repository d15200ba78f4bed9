"""The one executor: runs a rank's list of actions over a transport.

Training, evaluation and the two halves of the exact two-phase order differ in their lists alone. Receives are posted
where the list says and awaited where a stage needs them; sends never block. Values are freed as soon as no action
needs them. A stage that recomputes runs twice: without gradients when its forward is due, with them before its
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from pfeife_accelerate.errors import assert_never
from pfeife_accelerate.ir.actions import Action, ActionKind
from pfeife_accelerate.ir.program import InputKind, StageProgram
from pfeife_accelerate.ir.seeds import derived_seed
from pfeife_accelerate.runtime.recorder import Recorder
from pfeife_accelerate.runtime.step import MessageValues, MicrobatchInputs, RankProgram, StepInputs, StepState
from pfeife_accelerate.runtime.transport import AbstractTransport, PendingReceive

_GRADIENT_TAG = 1 << 24
_VALUES_PER_RANK = 1 << 8
_MICROBATCHES = 1 << 10


@final
class Executor:
    """Runs programs on one rank of a pipeline."""

    def __init__(self, transport: AbstractTransport, device: torch.device) -> None:
        self.transport = transport
        self.device = device

    def run(self, program: RankProgram, inputs: StepInputs, state: StepState, recorder: Recorder | None = None) -> None:
        """Run all of the rank's actions; returns when its own work is done and its sends have left."""
        _Run(self, program, inputs, state, recorder).run()
        self.transport.flush()


class _Stage:
    """A stage at work in one step: its program, with the arguments that are the same for all micro-batches in place."""

    __slots__ = ("arguments", "forgets", "index", "loss_values", "open", "outputs", "repetition", "run")

    def __init__(
        self,
        program: StageProgram,
        states: Mapping[str, torch.Tensor],
        loss_values: Sequence[str],
        *,
        training: bool,
    ) -> None:
        self.index = program.index
        self.run = program.run
        self.repetition = program.repetition if training else None
        self.outputs = program.outputs
        self.loss_values = loss_values
        """What the loss reads, in the stage behind which it is computed."""
        self.arguments = [states[i.name] if i.kind is InputKind.STATE else None for i in program.inputs]
        self.open = [(n, i.kind, i.name) for n, i in enumerate(program.inputs) if i.kind is not InputKind.STATE]
        """Position, kind and name of the arguments that differ."""
        self.forgets = {*loss_values, *(i.name for i in program.inputs if i.kind is InputKind.VALUE)}
        """Values that it reads, and needs no more afterwards."""


class _Run:
    def __init__(
        self,
        executor: Executor,
        program: RankProgram,
        inputs: StepInputs,
        state: StepState,
        recorder: Recorder | None,
    ) -> None:
        self.transport = executor.transport if recorder is None else recorder.transport
        self.recorder = recorder
        self.device = executor.device
        self.program = program
        self.inputs = inputs
        self.state = state
        self.pending: dict[tuple[str, int], PendingReceive] = {}
        self.pending_gradients: dict[tuple[int, int], list[tuple[str, PendingReceive]]] = {}
        self.readers = program.readers
        self.left: dict[tuple[str, int], set[int]] = {}
        self.stages = {
            stage: _Stage(
                made,
                inputs.states,
                program.loss_values if stage == program.loss_stage else (),
                training=inputs.training,
            )
            for stage, made in program.stages.items()
        }
        self.first_run: tuple[int, int] | None = None
        self.autocast = torch.autocast(*inputs.autocast) if inputs.autocast else None

    def run(self) -> None:
        ends = {} if self.inputs.on_stage_done is None else self.program.ends_of_stages
        with torch.set_grad_enabled(self.inputs.training):
            for position, action in enumerate(self.program.actions):
                self.perform(action)
                if self.recorder is not None:
                    self.recorder.ended(action)
                if position in ends:
                    self.tell(ends[position])
        self.let_go()

    def tell(self, stages: Sequence[int]) -> None:
        """These stages' parameters have their gradients."""
        assert self.inputs.on_stage_done is not None
        for stage in stages:
            self.inputs.on_stage_done(stage)
        if self.recorder is not None:
            self.recorder.skip()

    def perform(self, action: Action) -> None:
        if action.kind.is_compute:
            self.let_go()
        match action.kind:
            case ActionKind.FORWARD:
                self.forward(action.stage, action.microbatch)
            case ActionKind.BACKWARD:
                self.backward(action.stage, action.microbatch)
                self.state.finish_weight_gradients(action.stage, action.microbatch)
            case ActionKind.INPUT_GRADIENT:
                self.backward(action.stage, action.microbatch)
            case ActionKind.WEIGHT_GRADIENT:
                self.state.finish_weight_gradients(action.stage, action.microbatch)
            case ActionKind.SEND_F:
                self.send_values(action)
            case ActionKind.RECV_F:
                self.post_values(action)
            case ActionKind.SEND_B:
                self.send_gradients(action)
            case ActionKind.RECV_B:
                self.post_gradients(action)
            case _:
                assert_never(action.kind)

    # -------------------------------------------------------------------------------------------- compute

    def forward(self, stage: int, microbatch: int) -> None:
        work, data = self.stages[stage], self.inputs.microbatches[microbatch]
        arguments = self.arguments(work, data)
        if work.repetition is None:
            made = self.call(work.run, arguments)
        else:
            self.state.before[stage, microbatch] = {i: arguments[i].clone() for i in work.repetition.changing}
            self.first_run = stage, microbatch
            with torch.no_grad():
                made = self.call(work.repetition.forward, arguments)
        del arguments
        results = list(zip(work.outputs, made, strict=True))
        values = self.state.values[microbatch]
        for name, result in results:
            if self.inputs.keep(name):
                self.state.kept.setdefault(name, {})[microbatch] = result.detach()
            if name in self.readers:
                wants_grad = self.inputs.training and data.values[name].requires_grad
                values[name] = result.detach().requires_grad_(wants_grad)
        self.state.outputs[stage, microbatch] = results
        if work.loss_values:
            self.loss(work, data, is_final=work.repetition is None)
        if not self.inputs.training:
            self.forget(stage, microbatch)

    def call(self, function: Callable[..., tuple[Any, ...]], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """A stage's function in the mixed precision that the script has around the whole model."""
        if self.autocast is None:
            return function(*arguments)
        with self.autocast:
            return function(*arguments)

    def let_go(self) -> None:
        """A first run's results have left: its second run makes them again."""
        if self.first_run is not None:
            del self.state.outputs[self.first_run]
            self.first_run = None

    def run_again(self, stage: int, microbatch: int) -> None:
        """The second run of a stage that recomputes its activations, on the same arguments; others have run."""
        before = self.state.before.pop((stage, microbatch), None)
        if before is None:
            return
        work, data = self.stages[stage], self.inputs.microbatches[microbatch]
        arguments = self.arguments(work, data)
        for position, value in before.items():
            arguments[position] = value
        made = self.call(work.run, arguments)
        self.state.outputs[stage, microbatch] = list(zip(work.outputs, made, strict=True))
        if work.loss_values and self.inputs.loss is not None:
            self.loss(work, data, is_final=True)

    def loss(self, work: _Stage, data: MicrobatchInputs, *, is_final: bool) -> None:
        """The micro-batch's loss; without one (first half of the exact order), keep what it will be computed from.

        Results that are not final will be computed again, and the loss from those.
        """
        index = data.rows.index
        results = dict(self.state.outputs[work.index, index])
        read = {n: results[n] if n in results else self.value(n, data) for n in work.loss_values}
        for name, value in read.items():
            if self.inputs.loss is None or self.inputs.keep(name):
                self.state.kept.setdefault(name, {})[index] = value.detach()
        if self.inputs.loss is not None and is_final:
            with torch.enable_grad():
                self.state.losses[index] = self.inputs.loss.forward(data.rows, read)

    def arguments(self, work: _Stage, data: MicrobatchInputs) -> list[Any]:
        """All that the stage is called with; what is not here yet is waited for, also what only the loss reads."""
        arguments = work.arguments.copy()
        for position, kind, name in work.open:
            arguments[position] = self.argument(kind, name, work.index, data)
        for name in work.loss_values:
            if name not in work.outputs:
                self.value(name, data)
        return arguments

    def argument(self, kind: InputKind, name: str, stage: int, data: MicrobatchInputs) -> Any:
        match kind:
            case InputKind.VALUE:
                return self.value(name, data)
            case InputKind.MODEL_INPUT:
                return data.arguments[name]
            case InputKind.SIZE:
                return data.sizes[name]
            case InputKind.SEED:
                return derived_seed(self.inputs.seed, data.rows.index)
            case InputKind.LATER:
                return self.state.weight_gradients_of(stage, data.rows.index) if self.inputs.training else None
            case InputKind.STATE:
                return self.inputs.states[name]
            case _:
                assert_never(kind)

    def value(self, name: str, data: MicrobatchInputs) -> torch.Tensor:
        """A value made by an earlier stage: here already, or to be waited for."""
        values = self.state.values[data.rows.index]
        if name not in values:
            received = self.pending.pop((name, data.rows.index)).wait()
            wants_grad = self.inputs.training and data.values[name].requires_grad
            values[name] = received.requires_grad_(wants_grad)
        return values[name]

    def backward(self, stage: int, microbatch: int) -> None:
        self.run_again(stage, microbatch)
        roots, gradients = self.roots(stage, microbatch)
        if roots:
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        self.forget(stage, microbatch)

    def roots(self, stage: int, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """What a backward starts from: the loss, and results with the gradients that have come for them."""
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if stage == self.program.loss_stage and microbatch in self.state.losses:
            roots.append(self.state.losses.pop(microbatch))
            gradients.append(None)
        incoming = self.incoming_gradients(stage, microbatch)
        for name, output in self.state.outputs.pop((stage, microbatch)):
            gradient = incoming.get(name)
            if gradient is not None and output.requires_grad:
                roots.append(output)
                gradients.append(gradient)
        return roots, gradients

    def incoming_gradients(self, stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        """For each result of the stage, the sum of the gradients from all its readers."""
        total: dict[str, torch.Tensor] = {}

        def add(name: str, gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                total[name] = total[name] + gradient if name in total else gradient

        values = self.state.values[microbatch]
        for name, _ in self.state.outputs[stage, microbatch]:
            if name in values:
                add(name, values.pop(name).grad)
        for name, receive in self.pending_gradients.pop((stage, microbatch), ()):
            add(name, receive.wait())
        if stage == self.program.loss_stage:
            own = {name for name, _ in self.state.outputs[stage, microbatch]}
            for name in self.program.loss_values:
                gradient = self.inputs.gradients.get((name, microbatch))
                if name in own:
                    add(name, gradient)
                elif gradient is not None:
                    leaf = values[name]
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        return total

    def forget(self, stage: int, microbatch: int) -> None:
        """Free what no later action of this rank reads. What gradients are sent or handed over for stays until then."""
        values = self.state.values[microbatch]
        for name in self.stages[stage].forgets:
            if name in values and not values[name].requires_grad:
                # The stages of a rank may come in any order; after this they need the value no more.
                left = self.left.setdefault((name, microbatch), set(self.readers[name]))
                left.discard(stage)
                if not left:
                    del values[name]

    # -------------------------------------------------------------------------------------------- transfers

    def send_values(self, action: Action) -> None:
        assert action.peer is not None
        results = dict(self.state.outputs[action.stage, action.microbatch])
        message = self.message(action)
        for i, name in enumerate(message.values, message.first_number):
            self.transport.send(results[name].detach(), action.peer, _tag(action, i, 0))

    def post_values(self, action: Action) -> None:
        assert action.peer is not None
        data = self.inputs.microbatches[action.microbatch]
        message = self.message(action)
        for i, name in enumerate(message.values, message.first_number):
            info = data.values[name]
            receive = self.transport.post_receive(info.shape, info.dtype, self.device, action.peer, _tag(action, i, 0))
            self.pending[name, action.microbatch] = receive

    def send_gradients(self, action: Action) -> None:
        assert action.peer is not None
        values = self.state.values[action.microbatch]
        message = self.message(action)
        for i, name in enumerate(message.with_grad, message.first_number):
            leaf = values.pop(name)
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self.transport.send(gradient, action.peer, _tag(action, i, _GRADIENT_TAG))

    def post_gradients(self, action: Action) -> None:
        assert action.peer is not None
        data = self.inputs.microbatches[action.microbatch]
        message = self.message(action)
        posted = self.pending_gradients.setdefault((action.stage, action.microbatch), [])
        for i, name in enumerate(message.with_grad, message.first_number):
            info = data.values[name]
            tag = _tag(action, i, _GRADIENT_TAG)
            posted.append((name, self.transport.post_receive(info.shape, info.dtype, self.device, action.peer, tag)))

    def message(self, action: Action) -> MessageValues:
        """What a transfer carries."""
        assert action.reader is not None
        return self.program.messages[action.stage, action.reader]


def _tag(action: Action, value: int, direction: int) -> int:
    return direction + (action.stage * _MICROBATCHES + action.microbatch) * _VALUES_PER_RANK + value
