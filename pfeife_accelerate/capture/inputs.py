"""A call's arguments as real tensors; those that a gradient must flow into become leaves of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pfeife_accelerate.capture.deferred import DeferredTensor, resolve
from pfeife_accelerate.capture.script import script_line
from pfeife_accelerate.compat import pytree
from pfeife_accelerate.errors import PfeifeError


@dataclass(frozen=True, eq=False)
class InputLink:
    """An argument that a gradient must flow into: what the script passed, and the leaf tensor that the stages read."""

    index: int
    source: torch.Tensor
    leaf: torch.Tensor


class Inputs:
    """The arguments of one call."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.versions: list[tuple[torch.Tensor, int]] = []
        """The script's own tensors, and how often they had been changed in place."""

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the model with in place of the script's arguments."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(self._plain, (args, kwargs))
        return found

    def _plain(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if isinstance(item, DeferredTensor):
            value = resolve(item)
        else:
            value = item
            if not item.is_inference():
                self.versions.append((item, item._version))
        if not (torch.is_grad_enabled() and item.requires_grad):
            return value
        if id(item) not in self._leaves:
            self._leaves[id(item)] = item, value.detach().requires_grad_()
        return self._leaves[id(item)][1]

    @property
    def differentiable(self) -> frozenset[int]:
        """The leaves that a gradient flows into, by `id`."""
        return frozenset(id(leaf) for _, leaf in self._leaves.values())

    def links(self, arguments: tuple[Any, ...]) -> tuple[InputLink, ...]:
        """Which of a graph's arguments they became."""
        sources = {id(leaf): source for source, leaf in self._leaves.values()}
        return tuple(InputLink(i, sources[id(a)], a) for i, a in enumerate(arguments) if id(a) in sources)


def values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with values in place of deferred tensors, for a model that runs at once.

    Raises: PfeifeError PF534 for deferred tensors that need gradients.
    """

    def value(item: Any) -> Any:
        if not isinstance(item, DeferredTensor):
            return item
        if torch.is_grad_enabled() and item.requires_grad:
            raise PfeifeError(
                id="PF534",
                what="the output of a pipelined model was passed to a prepared model that runs unpipelined",
                where=script_line(),
                why="what runs unpipelined is differentiated at once, and the pipelined model's backward comes later",
                hints=("pass it detached", "do not prepare the second model", "make both one prepared model"),
            )
        return resolve(item)

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(value, (args, kwargs))
    return found
