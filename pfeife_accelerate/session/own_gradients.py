"""The own parameters' gradients as the last backward left them, for other ranks whose scripts read them.

Models: a reader at the same line of the script, which may come when this rank has changed its gradients, stepped its
optimizer and dropped them already. How often a gradient has been changed is told by the tensor's version; copies are
kept of the moments at which somebody is likely to read: where this rank's own script reads others' gradients, and after
each backward once any rank has read. A reader may also be one backward behind: the next one can go through calls that
all ranks had made before.
Ignores: changes through `.data`, which leave no trace; a reader that made one does not ask.
"""

from __future__ import annotations

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.tensor_server import TooEarly
from pfeife_accelerate.session.placement import Placement


class OwnGradients:
    """One model's gradients on one rank, until the next forward."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._given: dict[int, dict[str, tuple[torch.Tensor, int]]] = {}
        self._copies: dict[tuple[int, str, int], torch.Tensor] = {}
        self._is_read = False
        self._last_call = 0
        self.num_backwards = 0
        """Which backward the script's gradients are of: alike on all ranks."""

    def note_backward(self, last_call: int) -> None:
        """Gradients are whole; `last_call` is the number of the last call of a model that the script has made."""
        before, self.num_backwards = self.num_backwards, self.num_backwards + 1
        grads = {name: p.grad for name, p in self._placement.placed.items()}
        given = {name: (grad, grad._version) for name, grad in grads.items() if grad is not None}
        self._given = {n: of_one for n, of_one in self._given.items() if n == before} | {self.num_backwards: given}
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] == before}
        self._last_call = last_call
        if self._is_read:
            self.keep_copies()

    def keep_copies(self) -> None:
        """This is a moment at which other ranks may read."""
        for name, (gradient, version) in self._given.get(self.num_backwards, {}).items():
            moment = self.num_backwards, name, gradient._version - version
            if moment not in self._copies:
                self._copies[moment] = gradient.detach().clone()

    def forget(self, call: int) -> None:
        """The model runs. If all ranks' scripts have made that call after the last backward, they have gone past the
        lines where they might read its gradients.
        """
        if call > self._last_call:
            self._given.clear()
            self._copies.clear()

    def give(self, key: str) -> torch.Tensor:
        """The gradient of a parameter after a backward and a number of changes: `name/backward/edits`. Zero if the
        loss did not reach it.

        Raises: PfeifeError PF541 if the tensor has been changed more often, and no copy was kept; TooEarly if less.
        """
        name, backward, edits = key.rsplit("/", 2)
        self._is_read = True
        moment = int(backward), name, int(edits)
        if moment[0] > self.num_backwards:
            raise TooEarly(f"the backward number {backward} of {name!r} has not come")
        if moment in self._copies:
            return self._copies[moment]
        given = self._given.get(moment[0])
        if given is None:
            raise _too_late(name)
        if name not in given:
            return torch.zeros_like(self._placement.placed[name])
        gradient, version = given[name]
        changes = gradient._version - version
        if changes < int(edits):
            raise TooEarly(f"{name!r} has been changed {changes} times, not {edits}")
        if changes > int(edits):
            raise _too_late(name)
        return gradient


def _too_late(name: str) -> PfeifeError:
    return PfeifeError(
        id="PF541",
        what=f"the gradient of {name!r} was asked for at another moment than that of the rank that has it",
        why="gradients are changed on each rank without waiting for the others",
        hints=("read gradients on all ranks alike", "read them before the script changes any"),
    )
