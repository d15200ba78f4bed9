"""What is around a schedule on one rank: where its gradients go, and the buffers that it is to find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pfeife_accelerate.runtime.step import OnStageDone, RankProgram
from pfeife_accelerate.session.buffers import as_the_first_time
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.conductor import Announcement
from pfeife_accelerate.session.programs import Run

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel


@contextmanager
def surroundings(
    model: PipelinedModel, call: Call, announcement: Announcement, program: RankProgram
) -> Iterator[OnStageDone | None]:
    """Around a schedule; gives what is to be told when a stage has run its last backward."""
    with ExitStack() as stack:
        on_stage_done: OnStageDone | None = None
        if announcement.run in (Run.PLANNED, Run.BACKWARD):
            on_stage_done = stack.enter_context(model.gradients.collecting(call, model.session, announcement, program))
        if announcement.run in (Run.PLANNED, Run.FORWARD):
            stack.enter_context(as_the_first_time(call, model.placement.placed_buffers))
        yield on_stage_done
