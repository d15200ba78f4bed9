"""Micro-batches: how the rows of a batch are divided, the part of a value that belongs to one, and the way back.

Models: whole groups of rows (see `RowGroups`), sizes that differ by at most one group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Groups `first_group` to `first_group + num_groups` of a batch of `total` rows; `index` is its number."""

    index: int
    first_group: int
    num_groups: int
    total: int
    groups: RowGroups = CONTIGUOUS

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Its rows: (first row, number of rows), in the batch's order."""
        return self.groups.ranges(self.first_group, self.num_groups, self.total)

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self.num_groups * self.groups.rows_per_group


@functools.lru_cache(maxsize=64)
def divide(rows: int, num_microbatches: int, groups: RowGroups = CONTIGUOUS) -> tuple[Microbatch, ...]:
    """Divide `rows` into `num_microbatches` micro-batches, or into one a group if there are fewer groups than that."""
    total = groups.number(rows)
    number = max(1, min(total, num_microbatches))
    base, extra = divmod(total, number)
    microbatches, first = [], 0
    for index in range(number):
        count = base + (index < extra)
        microbatches.append(Microbatch(index=index, first_group=first, num_groups=count, total=rows, groups=groups))
        first += count
    return tuple(microbatches)


def take(tensor: torch.Tensor, dim: int, rows: Microbatch, rows_per_item: int = 1) -> torch.Tensor:
    """The micro-batch's part of a whole-batch value with `rows_per_item` entries in `dim` for each row."""
    parts = [tensor.narrow(dim, first * rows_per_item, count * rows_per_item) for first, count in rows.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def whole(parts: Sequence[torch.Tensor], dim: int, microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """The whole-batch value, rows in the batch's order, from the values of all its micro-batches."""
    if len(parts) == 1:
        return parts[0]
    pieces: list[tuple[int, torch.Tensor]] = []
    for part, rows in zip(parts, microbatches, strict=True):
        per_item, at = part.shape[dim] // rows.count, 0
        for first, count in rows.ranges:
            pieces.append((first, part.narrow(dim, at, count * per_item)))
            at += count * per_item
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)
