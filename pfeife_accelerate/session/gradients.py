"""Gradients between the schedule that computes them and the script that asks for them.

Models: gradients computed before this rank's script called `backward` (held aside, since the script may still zero its
gradients), and what starts while stages still run: sums of tied parameters, and means over pipelines where the script
waits for them already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pfeife_accelerate.ir.program import InputKind
from pfeife_accelerate.runtime.step import OnStageDone, RankProgram
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.placement import Placement
from pfeife_accelerate.session.replicas import ReplicaMeans
from pfeife_accelerate.session.tied import TiedSums

if TYPE_CHECKING:
    from pfeife_accelerate.session.conductor import Announcement
    from pfeife_accelerate.session.lifecycle import Session


class GradientBook:
    """The own parameters' gradients of one model on one rank."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.replicas = ReplicaMeans(placement)

    @contextmanager
    def collecting(
        self, call: Call, session: Session, announcement: Announcement, program: RankProgram
    ) -> Iterator[OnStageDone]:
        """Around a schedule with backwards: then `.grad` is whole, or `call.held_gradients` if the script has not
        asked for this backward yet, or if its result may have to be dropped (a guess, a loss on trial).

        Gives: what is to be told the stages that have run their last backward.
        """
        own, shared, request = self.placement.placed, self.placement.shared, announcement.request
        # Another rank may have read a value, and a loss been guessed, when this rank's script is in `backward`.
        held = announcement.on_trial or announcement.guess is not None or call.asked <= request
        aside = {name: p.grad for name, p in own.items() if held or name in shared}
        for name in aside:
            own[name].grad = None
        tied = TiedSums(self.placement, session.transport)
        starts_means = not held and self.replicas.expects(call, request)
        read = {stage: _states_of(program, stage) for stage in program.stages}

        def on_stage_done(stage: int) -> None:
            del read[stage]
            to_come = frozenset[str]().union(*read.values())
            tied.go_on(to_come)
            if starts_means:
                self.replicas.go_on(session, to_come)

        yield on_stage_done
        for name, total in tied.finish().items():
            own[name].grad = total
        if held:
            call.held_gradients[request] = {name: p.grad for name, p in own.items()}
        for name, before in aside.items():
            own[name].grad = before if held else _sum(before, own[name].grad)

    def release(self, call: Call, request: int) -> None:
        """The script has asked: gradients held aside are added to `.grad`."""
        for name, gradient in call.held_gradients.pop(request, {}).items():
            parameter = self.placement.placed[name]
            parameter.grad = _sum(parameter.grad, gradient)


def _states_of(program: RankProgram, stage: int) -> frozenset[str]:
    """The parameters and buffers that a stage reads."""
    return frozenset(i.name for i in program.stages[stage].inputs if i.kind is InputKind.STATE)


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
