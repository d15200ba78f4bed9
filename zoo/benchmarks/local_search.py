"""A simple search over cuts for one given order, to ask what uneven slicing is worth. It is not the planner's.

Models: descent from given cuts; a move shifts one cut, or all cuts from one on, by a few operations; the first better
neighbour is taken until there is none. Ignores: which cuts are allowed, other orders, local optima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["descend"]

_STEPS = (20, -20, 10, -10, 5, -5, 3, -3, 2, -2, 1, -1)

Cuts = tuple[int, ...]


def descend(value_of: Callable[[Cuts], float], start: Cuts, num_ops: int) -> tuple[float, Cuts]:
    """The least value found, and its cuts. `value_of` is infinite where cuts are not possible."""
    best, cuts = value_of(start), start
    seen = {start}
    improved = True
    while improved:
        improved = False
        for moved in _moves(cuts, num_ops):
            if moved in seen:
                continue
            seen.add(moved)
            value = value_of(moved)
            if value < best * (1 - 1e-9):
                best, cuts, improved = value, moved, True
                break
    return best, cuts


def _moves(cuts: Cuts, num_ops: int) -> Iterator[Cuts]:
    for step in _STEPS:
        for first in range(len(cuts)):
            for last in dict.fromkeys((first + 1, len(cuts))):
                moved = (*cuts[:first], *(cut + step for cut in cuts[first:last]), *cuts[last:])
                if all(a < b for a, b in zip((0, *moved), (*moved, num_ops), strict=True)):
                    yield moved
