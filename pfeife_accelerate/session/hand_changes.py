"""Whether the script has changed this rank's parameters by hand since the last moment that all ranks share.

The same line of the script runs on every rank, at another time. A rank that fetches a parameter has not come to a line
that changes it, or else it would know its own value of it: so what has been changed here is of a later moment. Models:
changes in place, told by a tensor's version, and `parameter.data = ...`, told by its memory; copies of the values
before, from where this rank's own script reads others' parameters, since the other ranks' scripts then do so too.
Ignores: buffers, and changes through `.data` in place, which leave no trace, where there is no copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from pfeife_accelerate.errors import PfeifeError

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel

_Mark = tuple[int, int]


class HandChanges:
    """The own parameters' marks as of the last shared moment."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._past: list[dict[int, torch.Tensor]] = []
        """Copies of the moments before, the latest first, as long as other ranks' scripts may be there."""

    def note_moment(self, models: Iterable[PipelinedModel]) -> None:
        """All ranks share this moment and have come to it: a schedule, a barrier."""
        self._past = []
        self._begin(models)

    def note_step(self, models: Iterable[PipelinedModel]) -> None:
        """An optimizer's step, which all ranks share, each at its own time: others may still read before it."""
        self._past.insert(0, self._copies)
        self._begin(models)

    def _begin(self, models: Iterable[PipelinedModel]) -> None:
        self._copies = {}
        self._marks = {id(p): _mark(p) for model in models for p in model.placement.placed.values()}

    def keep_copies(self, models: Iterable[PipelinedModel]) -> None:
        """This rank's script reads parameters of other ranks: these may read its own, and be slower."""
        if self._copies:
            return
        own = [p for model in models for p in model.placement.placed.values()]
        self._copies = {id(p): p.detach().clone() for p in own if self._marks.get(id(p)) == _mark(p)}

    def value(self, model: PipelinedModel, name: str, steps_before: int = 0) -> torch.Tensor | None:
        """A parameter's or buffer's value of the last shared moment, or a parameter's so many optimizer steps before:
        None if this rank's script has not read others' parameters there too.

        Raises: PfeifeError PF544 if the script has changed it by hand since, and no copy was kept.
        """
        parameter = model.placement.placed.get(name)
        if steps_before > 0:
            return self._past[steps_before - 1].get(id(parameter)) if steps_before <= len(self._past) else None
        if id(parameter) in self._copies:
            return self._copies[id(parameter)]  # also where a change through `.data` has left no trace
        if parameter is None or self._marks.get(id(parameter), _mark(parameter)) == _mark(parameter):
            return model.states.get(name)
        raise PfeifeError(
            id="PF544",
            what=f"{name!r} was asked for too late: the script on the rank that has it has changed it by hand",
            why="ranks run the same script, each at its own time, and another rank still reads the value before",
            hints=("call accelerator.wait_for_everyone() before the line that changes parameters",),
        )


def _mark(parameter: torch.Tensor) -> _Mark:
    return parameter.data_ptr(), parameter._version
