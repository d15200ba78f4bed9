"""The one executor: runs a rank's list of actions over a transport.

Training, evaluation and the two halves of the exact two-phase order differ in their lists alone. Receives are posted
where the list says and awaited where a stage needs them; sends never block. Values are freed as soon as no action
needs them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, final

import torch

from pfeife_accelerate.errors import InternalError, assert_never
from pfeife_accelerate.ir.actions import Action, ActionKind
from pfeife_accelerate.ir.program import InputKind
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
        backward = {a.stage for a in program.actions if a.kind is ActionKind.BACKWARD}
        self.will_go_back = inputs.training or bool(backward)

    def run(self) -> None:
        for action in self.program.actions:
            match action.kind:
                case ActionKind.FORWARD:
                    self.forward(action.stage, action.microbatch)
                case ActionKind.BACKWARD:
                    self.backward(action.stage, action.microbatch)
                case ActionKind.SEND_F:
                    self.send_values(action)
                case ActionKind.RECV_F:
                    self.post_values(action)
                case ActionKind.SEND_B:
                    self.send_gradients(action)
                case ActionKind.RECV_B:
                    self.post_gradients(action)
                case ActionKind.INPUT_GRADIENT | ActionKind.WEIGHT_GRADIENT:
                    raise InternalError(id="PF423", what=f"{action}: split backward is not executed by this version")
                case _:
                    assert_never(action.kind)
            if self.recorder is not None:
                self.recorder.ended(action)

    # -------------------------------------------------------------------------------------------- compute

    def forward(self, stage: int, microbatch: int) -> None:
        program, data = self.program.stages[stage], self.inputs.microbatches[microbatch]
        arguments = [self.argument(kind.kind, kind.name, data) for kind in program.inputs]
        training = self.inputs.training
        with torch.set_grad_enabled(training), self.autocast():
            results = dict(zip(program.outputs, program.run(*arguments), strict=True))
        del arguments
        values = self.state.values[microbatch]
        for name, result in results.items():
            if self.inputs.keep(name):
                self.state.kept.setdefault(name, {})[microbatch] = result.detach()
            if name in self.readers:
                wants_grad = training and data.values[name].requires_grad
                values[name] = result.detach().requires_grad_(wants_grad)
        self.state.outputs[stage, microbatch] = list(results.items())
        if stage == self.program.loss_stage and self.program.loss_values:
            self.loss(data, results)
        if not training:
            self.forget(stage, microbatch)

    def loss(self, data: MicrobatchInputs, results: dict[str, torch.Tensor]) -> None:
        """The micro-batch's loss; without one (first half of the exact order), keep what it will be computed from."""
        read = {n: results[n] if n in results else self.value(n, data) for n in self.program.loss_values}
        for name, value in read.items():
            if self.inputs.loss is None or self.inputs.keep(name):
                self.state.kept.setdefault(name, {})[data.rows.index] = value.detach()
        if self.inputs.loss is not None:
            with torch.enable_grad():
                self.state.losses[data.rows.index] = self.inputs.loss.forward(data.rows, read)

    def argument(self, kind: InputKind, name: str, data: MicrobatchInputs) -> Any:
        match kind:
            case InputKind.STATE:
                return self.inputs.states[name]
            case InputKind.MODEL_INPUT:
                return data.arguments[name]
            case InputKind.SIZE:
                return data.sizes[name]
            case InputKind.SEED:
                return derived_seed(self.inputs.seed, data.rows.index)
            case InputKind.VALUE:
                return self.value(name, data)
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
        if roots:
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        self.forget(stage, microbatch)

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
        read = {i.name for i in self.program.stages[stage].inputs if i.kind is InputKind.VALUE}
        if stage == self.program.loss_stage:
            read.update(self.program.loss_values)
        for name in read:
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

    # -------------------------------------------------------------------------------------------- surroundings

    def autocast(self) -> Any:
        """The mixed precision the script asked for, around every stage as it would be around the whole model."""
        return torch.autocast(*self.inputs.autocast) if self.inputs.autocast else nullcontext()


def _tag(action: Action, value: int, direction: int) -> int:
    return direction + (action.stage * _MICROBATCHES + action.microbatch) * _VALUES_PER_RANK + value
