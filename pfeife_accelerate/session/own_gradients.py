"""The own parameters' gradients as the last backward left them, for other ranks whose scripts read them.

Models: a reader at the same line of the script, which may come when this rank has changed its gradients, stepped its
optimizer and dropped them already. How often a gradient has been changed is told by the tensor's version; copies are
kept of the moments at which somebody is likely to read: where this rank's own script reads others' gradients, and after
each backward once any rank has read.
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
        self._given: dict[str, tuple[torch.Tensor, int]] = {}
        self._copies: dict[tuple[str, int], torch.Tensor] = {}
        self._is_read = False

    def note_backward(self) -> None:
        """Gradients are whole."""
        grads = {name: p.grad for name, p in self._placement.placed.items()}
        self._given = {name: (grad, grad._version) for name, grad in grads.items() if grad is not None}
        self._copies.clear()
        if self._is_read:
            self.keep_copies()

    def keep_copies(self) -> None:
        """This is a moment at which other ranks may read."""
        for name, (gradient, version) in self._given.items():
            moment = name, gradient._version - version
            if moment not in self._copies:
                self._copies[moment] = gradient.detach().clone()

    def forget(self) -> None:
        """The model runs: every rank's script has gone past the lines where it might read them."""
        self._given.clear()
        self._copies.clear()

    def give(self, key: str) -> torch.Tensor:
        """The gradient of a parameter after a number of changes: `name/edits`. Zero if the loss did not reach it.

        Raises: PfeifeError PF541 if the tensor has been changed more often, and no copy was kept; TooEarly if less.
        """
        name, _, edits = key.rpartition("/")
        self._is_read = True
        if name not in self._given:
            return torch.zeros_like(self._placement.placed[name])
        copy = self._copies.get((name, int(edits)))
        if copy is not None:
            return copy
        gradient, version = self._given[name]
        changes = gradient._version - version
        if changes < int(edits):
            raise TooEarly(f"{name!r} has been changed {changes} times, not {edits}")
        if changes > int(edits):
            raise PfeifeError(
                id="PF541",
                what=f"the gradient of {name!r} was asked for at another moment than that of the rank that has it",
                why="gradients are changed on each rank without waiting for the others",
                hints=("read gradients on all ranks alike", "read them before the script changes any"),
            )
        return gradient
