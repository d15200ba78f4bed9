"""States of values in a loss that is computed a micro-batch at a time (see `loss`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd


class StateKind(Enum):
    """How a micro-batch's value relates to the whole batch's."""

    SPLIT = "split"
    OWNED = "owned"
    PARTIAL = "partial"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Window:
    """The items along a dimension that carries the batch: for each of them, the group of rows that it belongs to.

    A micro-batch has the items of its groups, in the window's order. So two windows are alike exactly if they list the
    same groups in the same order, wherever in the batch their rows are.

    With `picks`, the items are picked, by the positions in that result of the constant graph, out of the listed ones;
    which they are is known at each step only, and how many, `num_picks`, always.
    """

    groups: tuple[int, ...]
    picks: int | None = None
    num_picks: int = 0

    @property
    def items(self) -> int:
        """How many items."""
        return len(self.groups) if self.picks is None else self.num_picks

    @property
    def owner(self) -> int | None:
        """The group that all items belong to, if there is just one."""
        return self.groups[0] if self.picks is None and len(set(self.groups)) == 1 else None


@dataclass(frozen=True)
class State:
    """A state; `dim`, `rows` and `window` are meaningful for SPLIT alone, `group` for OWNED.

    A split value's whole is what the script sees: its dimension `dim` has `rows` entries for each item of `window`,
    items in order. A micro-batch's value is made of the entries that belong to the micro-batch's groups.
    """

    kind: StateKind
    dim: int = 0
    rows: int = 1
    window: Window = Window(())
    group: int = -1

    @property
    def is_split(self) -> bool:
        """Whether the value carries the batch."""
        return self.kind is StateKind.SPLIT

    @property
    def extent(self) -> int:
        """Size of the whole value's dimension `dim`."""
        return self.window.items * self.rows

    @property
    def owner(self) -> int | None:
        """The group whose micro-batch has the whole value, if there is one."""
        return self.group if self.kind is StateKind.OWNED else self.window.owner if self.is_split else None


def Split(dim: int, rows: int, window: Window) -> State:  # reads as a constructor beside the others below
    """Dimension `dim` carries the items of `window`, `rows` entries an item; equal states in one form."""
    if window.picks is None and window.groups:
        run = _common_run(window.groups)
        return State(StateKind.SPLIT, dim, rows * run, Window(window.groups[::run]) if run > 1 else window)
    return State(StateKind.SPLIT, dim, rows, window)


def _common_run(groups: Sequence[int]) -> int:
    """The greatest length of which all runs of equal groups are multiples."""
    common, start = 0, 0
    for i in range(1, len(groups) + 1):
        if i == len(groups) or groups[i] != groups[start]:
            common, start = gcd(common, i - start), i
            if common == 1:
                return 1
    return common


def Owned(group: int) -> State:
    """The micro-batch that has this group has the whole value, the others have none of it."""
    return State(StateKind.OWNED, group=group)


PARTIAL = State(StateKind.PARTIAL)
REPLICATED = State(StateKind.REPLICATED)


class Refused(Exception):
    """The loss does not separate over the batch because of `operation`."""

    def __init__(self, operation: str, where: str) -> None:
        super().__init__(operation)
        self.operation = operation
        self.where = where
