"""States of values in a loss that is computed a micro-batch at a time (see `loss`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StateKind(Enum):
    """How a micro-batch's value relates to the whole batch's."""

    SPLIT = "split"
    PARTIAL = "partial"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Window:
    """Items `start` to `stop` of the batch: all of them, or the part that a slice along the batch kept."""

    start: int
    stop: int

    @property
    def items(self) -> int:
        """How many items."""
        return self.stop - self.start


@dataclass(frozen=True)
class State:
    """A state; the fields beside `kind` are meaningful for SPLIT alone.

    A split value's whole is what the script sees: its dimension `dim` has `rows` entries for each item of `window`,
    items in order. A micro-batch's value is the contiguous part of it that belongs to the micro-batch's items.
    """

    kind: StateKind
    dim: int = 0
    rows: int = 1
    window: Window = Window(0, 0)

    @property
    def is_split(self) -> bool:
        """Whether the value carries the batch."""
        return self.kind is StateKind.SPLIT

    @property
    def extent(self) -> int:
        """Size of the whole value's dimension `dim`."""
        return self.window.items * self.rows


def Split(dim: int, rows: int, window: Window) -> State:  # reads as a constructor beside the two below
    """Dimension `dim` carries the items of `window`, `rows` entries an item."""
    return State(StateKind.SPLIT, dim, rows, window)


PARTIAL = State(StateKind.PARTIAL)
REPLICATED = State(StateKind.REPLICATED)


class Refused(Exception):
    """The loss does not separate over the batch because of `operation`."""

    def __init__(self, operation: str, where: str) -> None:
        super().__init__(operation)
        self.operation = operation
        self.where = where
