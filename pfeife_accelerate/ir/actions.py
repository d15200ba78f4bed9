"""What a rank does, one action after the other.

Models: the notation of `torch.distributed.pipelining` (`2F0` = stage 2, Forward, micro-batch 0), extended for a
transfer by its first reader and the peer rank (`1SEND_F3>4@0`). A transfer carries the stage that PRODUCED the
activation and the first stage that READS it on its rank, in both directions: (producing stage, first reader,
micro-batch) names it. Ignores: time and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pfeife_accelerate.errors import PfeifeError, did_you_mean

__all__ = ["Action", "ActionKind", "Schedule", "ScheduleFamily", "ScheduleSpec", "parse_family"]


class ActionKind(str, Enum):
    """The closed set of things a rank can do; the values are torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        """Whether it occupies the device; everything else is a transfer."""
        return len(self.value) == 1

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward or half of one."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)

    @property
    def gives_input_gradient(self) -> bool:
        """Whether the gradients for the producing stages exist after it."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


_ACTION = re.compile(r"(\d+)(?:([FBIW])(\d+)|(SEND_F|RECV_F|SEND_B|RECV_B)(\d+)>(\d+)@(\d+))")


@dataclass(frozen=True, kw_only=True)
class Action:
    """One action; of a transfer, `reader` is the first STAGE that reads it on its rank, `peer` the other RANK."""

    kind: ActionKind
    stage: int
    microbatch: int
    reader: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """The text form, `2F0` or `1SEND_F3>4@0`."""
        reader = "" if self.reader is None else f">{self.reader}"
        peer = "" if self.peer is None else f"@{self.peer}"
        return f"{self.stage}{self.kind.value}{self.microbatch}{reader}{peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form back."""
        found = _ACTION.fullmatch(text.strip())
        if found is None:
            raise PfeifeError(
                id="PF211",
                what=f"{text!r} is not an action",
                why="an action is stage, kind, micro-batch, and for a transfer >first reading stage and @rank",
                hints=("2F0, 1B3, 1SEND_F3>4@0",),
            )
        stage, compute, microbatch, transfer, sent, reader, peer = found.groups()
        if compute is not None:
            return cls(kind=ActionKind(compute), stage=int(stage), microbatch=int(microbatch))
        return cls(
            kind=ActionKind(transfer), stage=int(stage), microbatch=int(sent), reader=int(reader), peer=int(peer)
        )


class ScheduleFamily(str, Enum):
    """The orders we can generate. Stage s lives on rank s mod D, but in a wave, which turns round at both ends."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LOOPED = "looped"  #: of the Pfeife paper
    INTERLEAVED = "interleaved"  #: of Megatron-LM: looped, with blocks of D micro-batches and all forwards prefetched
    WAVE = "wave"  #: stages 0 to D-1, then D-1 to 0, and so on; a V with two loops
    ZB_H1 = "zb-h1"  #: zero bubble with the memory of 1F1B: weight gradients fill the gaps
    ZB_V = "zb-v"  #: the same on a V
    LIST = "list"  #: an explicit order, made by list scheduling; no formula gives it

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are jobs of their own."""
        return self in (ScheduleFamily.ZB_H1, ScheduleFamily.ZB_V)

    @property
    def is_wave(self) -> bool:
        """Whether the placement turns round at the last rank."""
        return self in (ScheduleFamily.WAVE, ScheduleFamily.ZB_V)


def parse_family(text: str) -> ScheduleFamily:
    """The family called `text`, any case."""
    names = [family.value for family in ScheduleFamily]
    if text.lower() in names:
        return ScheduleFamily(text.lower())
    near = did_you_mean(text, names)
    raise PfeifeError(
        id="PF212",
        what=f"unknown schedule {text!r}",
        why=f"the schedules are {', '.join(names)}",
        hints=(f"did you mean {near!r}?" if near else "auto, which tries them all",),
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The few numbers an order follows from; there are num_loops stages per rank."""

    family: ScheduleFamily
    num_ranks: int
    num_microbatches: int
    num_loops: int = 1
    microbatches_per_loop: int | None = None  #: looped only; None = as many as ranks
    prefetch_forwards: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing together."""
        for name, value, least in (
            ("num_ranks", self.num_ranks, 1),
            ("num_microbatches", self.num_microbatches, 1),
            ("num_loops", self.num_loops, 1),
            ("prefetch_forwards", self.prefetch_forwards, 0),
        ):
            if value < least:
                raise _bad_spec(f"{name}={value}", f"{name} is at least {least}", f"{name}={least}")
        per_loop = self.microbatches_per_loop
        if self.family is not ScheduleFamily.LOOPED and per_loop is not None:
            raise _bad_spec(
                f"microbatches_per_loop={per_loop} with schedule {self.family.value!r}",
                "only the looped schedule runs in blocks of micro-batches",
                "schedule: looped, or leave microbatches_per_loop out",
            )
        if per_loop is not None and not 1 <= per_loop <= self.num_microbatches:
            raise _bad_spec(
                f"microbatches_per_loop={per_loop} with {self.num_microbatches} micro-batches",
                "a block has at least 1 micro-batch and at most all of them",
                f"microbatches_per_loop={min(self.num_ranks, self.num_microbatches)}",
            )
        loops = _LOOPS_OF.get(self.family)
        if loops is not None and self.num_loops != loops:
            raise _bad_spec(
                f"num_loops={self.num_loops} with schedule {self.family.value!r}",
                f"{self.family.value} runs {'one stage' if loops == 1 else f'{loops} stages'} on each rank",
                f"schedule: looped, or num_loops={loops}",
            )
        if self.family is ScheduleFamily.GPIPE and self.prefetch_forwards:
            raise _bad_spec(
                f"prefetch_forwards={self.prefetch_forwards} with schedule 'gpipe'",
                "gpipe runs every forward before the first backward: there is nothing to prefetch",
                "prefetch_forwards=0, or schedule: 1f1b",
            )
        if self.prefetch_forwards and self.family not in (ScheduleFamily.ONE_F_ONE_B, ScheduleFamily.LOOPED):
            raise _bad_spec(
                f"prefetch_forwards={self.prefetch_forwards} with schedule {self.family.value!r}",
                f"{self.family.value} fixes how many forwards run ahead",
                "prefetch_forwards=0, or schedule: looped",
            )

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.num_ranks * self.num_loops

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        loops = (divmod(stage, self.num_ranks) for stage in range(self.num_stages))
        if not self.family.is_wave:
            return tuple(rank for _, rank in loops)
        return tuple(self.num_ranks - 1 - rank if loop % 2 else rank for loop, rank in loops)

    @property
    def block(self) -> int:
        """Micro-batches that pass through all ranks before the next ones start (the looped family)."""
        return self.microbatches_per_loop or min(self.num_ranks, self.num_microbatches)


_LOOPS_OF = {ScheduleFamily.ONE_F_ONE_B: 1, ScheduleFamily.ZB_H1: 1, ScheduleFamily.ZB_V: 2}


def _bad_spec(what: str, why: str, hint: str) -> PfeifeError:
    return PfeifeError(id="PF210", what=f"impossible schedule: {what}", why=why, hints=(hint,))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The explicit list of actions of every rank; `stage_ranks[s]` is the rank that owns stage s."""

    spec: ScheduleSpec
    per_rank: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]

    @classmethod
    def parse(cls, spec: ScheduleSpec, per_rank: Sequence[Sequence[str]], stage_ranks: Sequence[int]) -> Schedule:
        """The schedule whose actions are given as text."""
        actions = tuple(tuple(Action.parse(text) for text in texts) for texts in per_rank)
        return cls(spec=spec, per_rank=actions, stage_ranks=tuple(stage_ranks))

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return len(self.per_rank)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step."""
        return self.spec.num_microbatches

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank owns, increasing."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    @property
    def has_forward(self) -> bool:
        """Whether any forward is in it (an evaluation or a whole step)."""
        return any(a.kind is ActionKind.FORWARD for actions in self.per_rank for a in actions)

    @property
    def has_backward(self) -> bool:
        """Whether any backward is in it."""
        return any(a.kind.is_backward for actions in self.per_rank for a in actions)
