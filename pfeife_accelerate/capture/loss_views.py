"""Where the batch is after a reshape: which dimension's index tells the group of rows that an entry belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from pfeife_accelerate.capture.loss_states import Split, State, Window

_MOST_ENTRIES = 1 << 20


def viewed(state: State, before: Sequence[int], after: Sequence[int], dim: int) -> State | None:
    """The state of a split value of shape `before` once it is seen in shape `after`, if `dim` carries the batch then.

    In memory order the value is the window's items, `unit` entries each, over and over, once for each index in front of
    them. So it must be after the reshape, with the items of dimension `dim` in place of the window's.
    """
    times, unit = prod(before[: state.dim]), state.rows * prod(before[state.dim + 1 :])
    new_times, new_unit = prod(after[:dim]), prod(after[dim + 1 :])
    if not after[dim] or not times or not unit or not new_times or not new_unit:
        return None
    if state.window.picks is not None:
        same = new_times == times and unit % new_unit == 0
        return Split(dim, unit // new_unit, state.window) if same else None
    groups = state.window.groups
    if new_times % times == 0:
        groups, unit = _first_period(groups, unit, new_times // times)
    elif times % new_times == 0:
        groups = groups * (times // new_times) if len(groups) * (times // new_times) <= _MOST_ENTRIES else ()
    else:
        return None
    if not groups:
        return None
    if unit % new_unit == 0:
        return Split(dim, unit // new_unit, Window(groups))
    merged = _merged(groups, unit, new_unit)
    return Split(dim, 1, Window(merged)) if merged else None


def _first_period(groups: tuple[int, ...], unit: int, times: int) -> tuple[tuple[int, ...], int]:
    """The items of one of `times` equal parts, and the entries of each; nothing if the parts are not alike."""
    if times == 1:
        return groups, unit
    if len(groups) % times == 0:
        part = groups[: len(groups) // times]
        return (part, unit) if part * times == groups else ((), unit)
    alike = len(set(groups)) == 1 and (len(groups) * unit) % times == 0
    return ((groups[0],), len(groups) * unit // times) if alike else ((), unit)


def _merged(groups: tuple[int, ...], unit: int, new_unit: int) -> tuple[int, ...]:
    """The groups of items of `new_unit` entries each; nothing if one of them would belong to several groups."""
    common = gcd(unit, new_unit)
    if len(groups) * (unit // common) > _MOST_ENTRIES:
        return ()
    fine = [g for g in groups for _ in range(unit // common)]
    step = new_unit // common
    blocks = [fine[i : i + step] for i in range(0, len(fine), step)]
    return tuple(block[0] for block in blocks) if all(len(set(block)) == 1 for block in blocks) else ()
