"""Devices and links that take their time without doing anything, under the real executor and its real lists of actions.

Models: a device that works on one thing at a time, directed links that carry one message after the other, all at
planned speeds. A rank has a time of its own: it goes on by what is slept and by the processor time that the rank's
thread needs, so that many ranks on few processors, and threads that wake up late, delay each other by no more than the
last wake-up.
Ignores: memory, values (every tensor has one element), and whatever is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch

from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule
from pfeife_accelerate.ir.program import InputKind, StageInput, StageProgram, ValueInfo
from pfeife_accelerate.runtime.arrivals import TimedReceive
from pfeife_accelerate.runtime.microbatch import Microbatch, divide
from pfeife_accelerate.runtime.moments import Mark
from pfeife_accelerate.runtime.step import MessageValues, MicrobatchInputs, RankProgram, StepInputs
from pfeife_accelerate.runtime.transport import AbstractTransport, PendingReceive, WrappingTransport
from pfeife_accelerate.schedule import Messages

__all__ = ["EmulatedDevice", "EmulatedTransport", "Speeds", "emulated_inputs", "emulated_program", "sends_s"]

_DTYPE = torch.float64  # an element holds a moment exactly enough
_LOSS = "loss"

#: What a backward puts off: the gradients of parameters.
Later: TypeAlias = "list[Callable[[], None]]"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds of each kind of computation of each stage, and of each message: (is a gradient, producer, reader)."""

    compute_s: Mapping[tuple[ActionKind, int], float]
    transfer_s: Mapping[tuple[bool, int, int], float]


@final
class EmulatedDevice:
    """The time of one rank. All methods are for the rank's own thread."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """From here on: the rank's time is the host's now."""
        self._at_s, self._used_s = time.perf_counter(), time.thread_time()

    def now_s(self) -> float:
        """The rank's time; never ahead of the host's."""
        return self._at_s + time.thread_time() - self._used_s

    def until(self, moment_s: float) -> None:
        """Sleep until the host's clock shows a moment, if the rank has not come to it."""
        if moment_s <= self.now_s():
            return
        left_s = moment_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._at_s, self._used_s = moment_s, time.thread_time()

    def work(self, seconds: float) -> None:
        """Be busy for so long."""
        self.until(self.now_s() + seconds)


# -- links -------------------------------------------------------------------------------------------------------------


@final
class EmulatedTransport(WrappingTransport):
    """Over another transport between ranks of one host; each tensor takes along the moment when it is to be there."""

    def __init__(self, inner: AbstractTransport, device: EmulatedDevice, seconds: Sequence[float]) -> None:
        """`seconds` that each send takes, in the order of the sends."""
        super().__init__(inner)
        self._device = device
        self._seconds = iter(seconds)
        self._free_s: dict[int, float] = {}

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending and return; the message leaves when the link has carried those before it."""
        start_s = max(self._device.now_s(), self._free_s.get(peer, 0.0))
        self._free_s[peer] = arrival_s = start_s + next(self._seconds)
        self._inner.send(torch.tensor([float(tensor), arrival_s], dtype=_DTYPE), peer, tag)

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> PendingReceive:
        """Announce a receive and return."""
        return _EmulatedReceive(self._device, self._inner.post_receive((2,), _DTYPE, device, peer, tag))


@final
class _EmulatedReceive(TimedReceive):
    __slots__ = ("_arrival_s", "_device", "_receive")

    def __init__(self, device: EmulatedDevice, receive: PendingReceive) -> None:
        self._device = device
        self._receive = receive
        self._arrival_s = 0.0

    def wait(self) -> torch.Tensor:
        received = self._receive.wait()
        self._arrival_s = float(received[1])
        self._device.until(self._arrival_s)
        return received[:1].clone()

    @property
    def waited(self) -> tuple[Mark | None, Mark]:
        return None, round(self._arrival_s * 1e9)


# -- stages ------------------------------------------------------------------------------------------------------------


class _Work(torch.autograd.Function):
    """Takes time on the way back; the way forth is timed by the stage."""

    @staticmethod
    def forward(ctx: Any, stage: _Stage, later: Later | None, *read: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.stage, ctx.later, ctx.number_read = stage, later, len(read)
        return tuple(torch.ones(1, dtype=_DTYPE) for _ in range(stage.num_outputs))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stage = ctx.stage
        stage.device.work(stage.input_s)
        if ctx.later is None:
            stage.device.work(stage.weight_s)
        else:
            ctx.later.append(partial(stage.device.work, stage.weight_s))
        return (None, None, *(torch.ones(1, dtype=_DTYPE) for _ in range(ctx.number_read)))


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What a stage's program does: `run` of a `StageProgram`.

    `anchor` makes the stage a part of the backward where no value of another stage is read.
    """

    device: EmulatedDevice
    forward_s: float
    input_s: float
    weight_s: float
    num_outputs: int

    def __call__(self, anchor: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.put_off(None, anchor, *values)

    def put_off(self, later: Later | None, anchor: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same with a list for the gradients of parameters."""
        self.device.work(self.forward_s)
        outputs: tuple[torch.Tensor, ...] = _Work.apply(self, later, anchor, *values)
        return outputs


class _Loss:
    """The sum of the last stage's result."""

    def forward(self, microbatch: Microbatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return values[_LOSS].sum()


def emulated_program(
    lowered: Schedule, rank: int, messages: Messages, speeds: Speeds, device: EmulatedDevice
) -> RankProgram:
    """One rank's program for lists that `lower` made for these messages; each message carries one value."""
    last = lowered.num_stages - 1
    made = {stage: [m for m in messages if m.producer_stage == stage] for stage in range(last + 1)}
    read = {stage: [m for m in messages if stage in m.consumer_stages] for stage in range(last + 1)}
    is_split = any(a.kind is ActionKind.WEIGHT_GRADIENT for a in lowered.per_rank[rank])

    def program(stage: int) -> StageProgram:
        outputs = (*(_name(m.route) for m in made[stage]), *((_LOSS,) if stage == last else ()))
        back = ActionKind.INPUT_GRADIENT if is_split else ActionKind.BACKWARD
        work = _Stage(
            device=device,
            forward_s=speeds.compute_s[ActionKind.FORWARD, stage],
            input_s=speeds.compute_s[back, stage],
            weight_s=speeds.compute_s[ActionKind.WEIGHT_GRADIENT, stage] if is_split else 0.0,
            num_outputs=len(outputs),
        )
        inputs = [StageInput(kind=InputKind.MODEL_INPUT, name="anchor")]
        if is_split:
            inputs.insert(0, StageInput(kind=InputKind.LATER, name="later"))
        inputs += (StageInput(kind=InputKind.VALUE, name=_name(m.route)) for m in read[stage])
        run = work.put_off if is_split else work
        return StageProgram(index=stage, run=run, inputs=tuple(inputs), outputs=outputs)

    own = lowered.stages_of(rank)
    readers = {_name(m.route): tuple(s for s in m.consumer_stages if s in own) for m in messages}
    return RankProgram(
        rank=rank,
        actions=lowered.per_rank[rank],
        stages={stage: program(stage) for stage in own},
        stage_ranks=lowered.stage_ranks,
        messages={
            m.route: MessageValues(
                values=(_name(m.route),), with_grad=(_name(m.route),) if m.has_grad else (), first_number=number
            )
            for stage in made
            for number, m in enumerate(made[stage])
        },
        readers={name: stages for name, stages in readers.items() if stages},
        loss_values=(_LOSS,),
    )


def emulated_inputs(messages: Messages, num_microbatches: int) -> StepInputs:
    """The data of a step: one row for each micro-batch."""
    anchor = torch.zeros(1, dtype=_DTYPE, requires_grad=True)
    values = {_name(m.route): ValueInfo(shape=(1,), dtype=_DTYPE, requires_grad=m.has_grad) for m in messages}
    batches = (
        MicrobatchInputs(rows=rows, arguments={"anchor": anchor}, sizes={}, values=values)
        for rows in divide(num_microbatches, num_microbatches)
    )
    return StepInputs(microbatches=tuple(batches), states={}, training=True, loss=_Loss())


def sends_s(actions: Sequence[Action], speeds: Speeds) -> list[float]:
    """What the sends in a rank's list take, for its `EmulatedTransport`."""
    return [
        speeds.transfer_s[action.kind is ActionKind.SEND_B, action.stage, action.reader]
        for action in actions
        if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B) and action.reader is not None
    ]


def _name(route: tuple[int, int]) -> str:
    return f"from {route[0]} first read by {route[1]}"
