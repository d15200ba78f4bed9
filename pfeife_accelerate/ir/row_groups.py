"""Which rows of a batch must stay in one micro-batch: the same rows of equal parts, runs of consecutive rows, or both.

Models: groups of rows that all have the same form. Ignores: groups that depend on the data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowGroups:
    """The batch is `parts` equal parts one after the other; a group is a run of `run` rows, the same in each part.

    `RowGroups()` is every row for itself, `RowGroups(parts=2)` row i of the first half with row i of the second,
    `RowGroups(run=2)` rows 0 and 1, rows 2 and 3, and so on.
    """

    parts: int = 1
    run: int = 1

    @property
    def rows_per_group(self) -> int:
        """How many rows a group has."""
        return self.parts * self.run

    def fits(self, total: int) -> bool:
        """Whether a batch of `total` rows can be divided into such groups."""
        return total % self.rows_per_group == 0

    def number(self, total: int) -> int:
        """How many groups there are in a batch of `total` rows."""
        return total // self.rows_per_group

    def group_of(self, row: int, total: int) -> int:
        """The group of one row."""
        return row % (total // self.parts) // self.run

    def ranges(self, first: int, count: int, total: int) -> tuple[tuple[int, int], ...]:
        """The rows of `count` groups, beginning with group `first`, as (first row, number of rows), in order."""
        part = total // self.parts
        if count * self.run == part:
            return ((0, total),)
        return tuple((i * part + first * self.run, count * self.run) for i in range(self.parts))


CONTIGUOUS = RowGroups()
"""Every row for itself: a micro-batch is any rows side by side."""
