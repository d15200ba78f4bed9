"""What stands for a parameter elsewhere: which one it is, where its values come from, and what a stub of it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

Edit = Callable[[torch.Tensor], Any]


class Source(Protocol):
    """Whoever can give the values of a model's parameters elsewhere."""

    device: torch.device
    """Where values are given, and where the owner's data would be if it were here."""

    @property
    def hides_gradients(self) -> bool:
        """Whether nobody is to see a gradient now: an optimizer skips parameters that have none."""

    @property
    def reads_later(self) -> bool:
        """Whether `detach()` need not fetch, because what it returns will be replaced (a state dict being made)."""

    def value(self, name: str) -> torch.Tensor:
        """A copy of the value as this rank's script should see it."""

    def overwrite(self, name: str, value: torch.Tensor) -> None:
        """From here on, until the model runs or an optimizer steps, this is the value on this rank."""

    def edit(self, name: str, edit: Edit | None, what: str, *, repeatable: bool) -> None:
        """The same for a change of whatever the value is; None: a change that only the owner can make.

        `repeatable`: made twice, it leaves what it leaves when made once.
        """

    def gradient(self, name: str, edits: int) -> torch.Tensor:
        """A copy of the gradient of the last backward, after so many changes in place by the script."""

    def rank_of(self, name: str) -> int:
        """The rank of the launch that owns the parameter."""


@dataclass(eq=False)
class Place:
    """Which parameter elsewhere a stub stands for, and what the script has done with its gradient."""

    name: str
    source: Source
    has_gradient: bool = False
    gradient: Any = None
    """The stub of it, once somebody has looked."""
    edits: int = 0
    """How often the script has changed the gradient in place since the last backward."""
    replaced_by: str | None = None
    """A change that only the owner knows the result of."""

    def note_backward(self) -> None:
        """There is a new gradient."""
        self.has_gradient, self.edits, self.replaced_by = True, 0, None


class Role(Enum):
    """What of the parameter a stub stands for."""

    PARAMETER = "the parameter itself"
    DATA = "its data"
    GRADIENT = "its gradient"


class Stub:
    """Part of every tensor class for something elsewhere. It says that it is where the owner's data would be here."""

    __slots__ = ()

    place: Place
    role: Role

    def value(self) -> torch.Tensor:
        """The parameter's value now, a copy without history."""
        return self.place.source.value(self.place.name)

    @property
    def device(self) -> torch.device:
        """Where the data would be."""
        return self.place.source.device

    @property
    def is_meta(self) -> bool:
        """There is no data here."""
        return True

    @property
    def is_cuda(self) -> bool:
        """As `device` says."""
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        """As `device` says."""
        return self.device.type == "cpu"

    def __hash__(self) -> int:
        return id(self)


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
