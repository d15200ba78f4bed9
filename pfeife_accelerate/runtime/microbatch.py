"""Micro-batches: how the rows of a batch are divided, and the part of an input that belongs to one.

Models: contiguous blocks of rows, sizes that differ by at most one. Ignores: pairings across blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Rows `start` to `start + count` of a batch of `total` rows; `index` is its number."""

    index: int
    start: int
    count: int
    total: int


def divide(rows: int, num_microbatches: int) -> tuple[Microbatch, ...]:
    """Divide `rows` into `num_microbatches` blocks, or into one a row if there are fewer rows than that."""
    number = max(1, min(rows, num_microbatches))
    base, extra = divmod(rows, number)
    blocks, start = [], 0
    for index in range(number):
        count = base + (index < extra)
        blocks.append(Microbatch(index=index, start=start, count=count, total=rows))
        start += count
    return tuple(blocks)
