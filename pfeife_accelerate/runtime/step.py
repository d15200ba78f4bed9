"""One step on one rank as data: what the executor is given, and what it keeps between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from pfeife_accelerate.ir.actions import Action
from pfeife_accelerate.ir.program import StageProgram, ValueInfo
from pfeife_accelerate.runtime.microbatch import Microbatch

#: Told each stage whose parameters get no more gradients in this step.
OnStageDone: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class MessageValues:
    """What one message carries: values of a stage that the same stage of a rank reads first, each once for the rank.

    `with_grad` are those that a gradient comes back for. `first_number` tells tensors under way apart: values that a
    stage gives to a rank are numbered through all its messages to that rank.
    """

    values: tuple[str, ...]
    with_grad: tuple[str, ...]
    first_number: int


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """All that one rank does in a step, whatever the data: its actions, its stages, and what the messages carry.

    `messages` is keyed by (producing stage, first reading stage). `readers` tells for each value which own stages read
    it.
    """

    rank: int
    actions: tuple[Action, ...]
    stages: Mapping[int, StageProgram]
    stage_ranks: tuple[int, ...]
    messages: Mapping[tuple[int, int], MessageValues]
    readers: Mapping[str, tuple[int, ...]]
    loss_values: tuple[str, ...] = ()

    @property
    def loss_stage(self) -> int:
        """The stage after which the loss is computed: the last."""
        return len(self.stage_ranks) - 1

    @cached_property
    def ends_of_stages(self) -> Mapping[int, tuple[int, ...]]:
        """The stages that have run their last backward, by the position in the list after which to say so.

        That is when the gradients they pass on have been given to the transport.
        """
        last = {a.stage: position for position, a in enumerate(self.actions) if a.kind.is_backward}
        ends: dict[int, tuple[int, ...]] = {}
        for stage, position in last.items():
            end = position
            while end + 1 < len(self.actions) and not self.actions[end + 1].kind.is_compute:
                end += 1
            ends[end] = (*ends.get(end, ()), stage)
        return ends


class LossStage(Protocol):
    """Computes the loss of a micro-batch from the pipeline's values, on the rank of the last stage."""

    def forward(self, microbatch: Microbatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The micro-batch's share of the loss, ready to be differentiated."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchInputs:
    """One micro-batch: its part of the call's arguments, its sizes, and the values that cross stages."""

    rows: Microbatch
    arguments: Mapping[str, Any]
    sizes: Mapping[str, Any]
    values: Mapping[str, ValueInfo]


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The data of one step. `keep` are values to hold on to, whole, for the script to read.

    `seed` is the call's, from which those of its micro-batches and random operations are derived. `on_stage_done` is
    told each stage whose parameters get no more gradients in this step.
    """

    microbatches: Sequence[MicrobatchInputs]
    states: Mapping[str, torch.Tensor]
    training: bool
    autocast: tuple[str, torch.dtype] | None = None
    seed: int = 0
    loss: LossStage | None = None
    keep: Callable[[str], bool] = lambda _name: False
    gradients: Mapping[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    on_stage_done: OnStageDone | None = None


class StepState:
    """What a rank holds between the actions of a step, micro-batch by micro-batch."""

    def __init__(self, num_microbatches: int) -> None:
        self.values: list[dict[str, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        """Values that own stages read: leaves of the reading stages' autograd graphs."""
        self.outputs: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = {}
        """Results of (stage, micro-batch), with their graphs, until its backward."""
        self.losses: dict[int, torch.Tensor] = {}
        self._weight_gradients: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.before: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """Of a stage that runs again: its arguments that change, by position, as its first run found them."""
        self.kept: dict[str, dict[int, torch.Tensor]] = {}

    def weight_gradients_of(self, stage: int, microbatch: int) -> list[Callable[[], None]]:
        """Where the stage's backward puts the computation of weight gradients, with what that needs."""
        return self._weight_gradients.setdefault((stage, microbatch), [])

    def finish_weight_gradients(self, stage: int, microbatch: int) -> None:
        """Compute what was put off, in the backward's order; what each of them needed is freed when it is done."""
        waiting = self._weight_gradients.pop((stage, microbatch), [])
        waiting.reverse()
        while waiting:
            waiting.pop()()
