"""What a micro-batch's part of a loss is given beside the pipeline's values: constants, whole or cut, and numbers.

Each operand is a description, equal for equal operands; `of` makes the operand of one micro-batch out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from pfeife_accelerate.capture.loss_states import State, Window


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One micro-batch: it has the groups of rows `start` to `start + count`."""

    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class WholeValues:
    """Constants of one step: computed on the whole batch, to be passed as they are or cut.

    `trainable` are the tensors outside the model that get a gradient: every micro-batch is given them as they are.
    """

    values: tuple[Any, ...]
    trainable: tuple[torch.Tensor, ...] = ()
    known: Known = field(default_factory=lambda: Known())
    """What has been worked out in this step."""
    lasting: Known = field(default_factory=lambda: Known())
    """The same for windows that do not change from step to step."""

    def groups(self, window: Window) -> torch.Tensor:
        """The group of each item of a window."""
        groups = torch.tensor(window.groups, dtype=torch.int64)
        return groups if window.picks is None else groups[self.values[window.picks].cpu()]

    def inside(self, window: Window, rows: Rows) -> torch.Tensor:
        """Positions in the window of the items that the micro-batch has."""
        known = self._known(window).positions
        if (window, rows) not in known:
            groups = self.groups(window)
            inside = (groups >= rows.start) & (groups < rows.start + rows.count)
            known[window, rows] = inside.nonzero().flatten()
        return known[window, rows]

    def places(self, window: Window, rows: Rows, entries: int) -> Places:
        """Where those items are in a dimension that has `entries` for each item of the window."""
        known = self._known(window).places
        key = window, rows, entries
        if key not in known:
            known[key] = _as_places(self.inside(window, rows), entries)
        return known[key]

    def _known(self, window: Window) -> Known:
        return self.lasting if window.picks is None else self.known


@dataclass(frozen=True)
class Known:
    """Of micro-batches and windows: positions in the window, and places in a dimension of so many entries an item."""

    positions: dict[tuple[Window, Rows], torch.Tensor] = field(default_factory=dict)
    places: dict[tuple[Window, Rows, int], Places] = field(default_factory=dict)


@dataclass(frozen=True)
class Stretch:
    """Consecutive entries of a dimension."""

    start: int
    length: int


Places: TypeAlias = "Stretch | torch.Tensor"


def taken(value: torch.Tensor, dim: int, places: Places) -> torch.Tensor:
    """The entries of a dimension that are at these places."""
    if isinstance(places, Stretch):
        return value.narrow(dim, places.start, places.length)
    return value.index_select(dim, places.to(value.device))


def _as_places(positions: torch.Tensor, rows: int) -> Places:
    """Entries of `rows` each at these positions; one stretch if they lie side by side in ascending order."""
    count = positions.numel()
    first = int(positions[0]) if count else 0
    if count == 0 or torch.equal(positions, torch.arange(first, first + count)):
        return Stretch(first * rows, count * rows)
    return (positions[:, None] * rows + torch.arange(rows)).flatten()


@dataclass(frozen=True)
class ConstantOperand:
    """Result `index` of the constant graph, as it is."""

    index: int

    def of(self, whole: WholeValues, rows: Rows) -> Any:
        """The operand for one micro-batch."""
        return whole.values[self.index]


@dataclass(frozen=True)
class CutOperand:
    """Result `index` of the constant graph, cut to the micro-batch's rows as a value of this state is."""

    index: int
    state: State

    def of(self, whole: WholeValues, rows: Rows) -> Any:
        """The operand for one micro-batch."""
        places = whole.places(self.state.window, rows, self.state.rows)
        return taken(whole.values[self.index], self.state.dim, places)


@dataclass(frozen=True)
class InsideOperand:
    """Where in a whole value's dimension, `rows` entries an item, the micro-batch's part is."""

    window: Window
    rows: int

    def of(self, whole: WholeValues, rows: Rows) -> Places:
        """The operand for one micro-batch."""
        return whole.places(self.window, rows, self.rows)


@dataclass(frozen=True)
class ItemsOperand:
    """How many items of a window the micro-batch has; as a fraction of all of them, if asked for."""

    window: Window
    fraction: bool = False

    def of(self, whole: WholeValues, rows: Rows) -> int | float:
        """The operand for one micro-batch."""
        count = whole.inside(self.window, rows).numel()
        return count / self.window.items if self.fraction else count


@dataclass(frozen=True)
class PlacesOperand:
    """Where, in the micro-batch's part of a window, those of certain items of the window are that it has.

    `items` are positions in the whole window, or result `items` of the constant graph that gives them.
    """

    window: Window
    items: range | tuple[int, ...] | int
    rows: int = 1

    def of(self, whole: WholeValues, rows: Rows) -> Places:
        """The operand for one micro-batch."""
        inside = whole.inside(self.window, rows)
        place = torch.full((self.window.items,), -1)
        place[inside] = torch.arange(inside.numel())
        wanted = whole.values[self.items].cpu() if isinstance(self.items, int) else torch.tensor(list(self.items))
        found = place[wanted]
        found = found[found >= 0]
        return found if isinstance(self.items, int) else _as_places(found, self.rows)


@dataclass(frozen=True)
class OwnedOperand:
    """Whether the micro-batch has a group."""

    group: int

    def of(self, whole: WholeValues, rows: Rows) -> bool:
        """The operand for one micro-batch."""
        return rows.start <= self.group < rows.start + rows.count


Operand = ConstantOperand | CutOperand | InsideOperand | ItemsOperand | PlacesOperand | OwnedOperand
