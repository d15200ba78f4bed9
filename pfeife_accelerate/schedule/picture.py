"""A timeline as text: one line per rank, time to scale.

Models: the computations, each as the number of its micro-batch and a filling that says what it is. What leaves no room
for a filling is the last digit of the number, or, to be told from a forward, a letter: a for 0 to j for 9 in a backward
or its gradients of values, A to J in the gradients of parameters. Ignores: transfers, and which of a rank's stages
computes; what is shorter than half a column may not show.

    rank 0 │0-1-2-3-....0===1===2===3===│
    rank 1 │..0-0===1-1===2-2===3-3===..│
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfeife_accelerate.errors import assert_never
from pfeife_accelerate.ir import Action, ActionKind, Interval, Timeline

__all__ = ["Cell", "cells", "draw", "frame", "legend"]

IDLE = "."
_LEAST_COLUMNS = 10


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One column of one rank's line, and the kind of computation that it belongs to (None: idle)."""

    text: str
    kind: ActionKind | None = None


def cells(timeline: Timeline, *, num_ranks: int, columns: int) -> tuple[tuple[Cell, ...], ...]:
    """The lines without their frames: for each rank, `columns` cells over the whole timeline."""
    computing: list[list[Interval]] = [[] for _ in range(num_ranks)]
    for interval in timeline.intervals:
        if interval.action.kind.is_compute:
            computing[interval.rank].append(interval)
    column_s = timeline.makespan_s / columns
    return tuple(_line(intervals, column_s, columns) for intervals in computing)


def _line(intervals: Sequence[Interval], column_s: float, columns: int) -> tuple[Cell, ...]:
    line = [Cell(text=IDLE)] * columns
    for interval in sorted(intervals, key=lambda interval: interval.start_s):
        # A column belongs to what runs in its middle, so that neighbours neither overlap nor leave a gap.
        first = round(interval.start_s / column_s) if column_s else 0
        last = min(round(interval.end_s / column_s), columns) if column_s else 0
        line[first:last] = _block(interval.action, last - first)
    return tuple(line)


def _block(action: Action, width: int) -> list[Cell]:
    number = str(action.microbatch)
    label = number if len(number) < width else number[-1]
    text = label.ljust(width, _filling(action.kind)) if width > 1 else _narrow(action) * width
    return [Cell(text=letter, kind=action.kind) for letter in text]


def _narrow(action: Action) -> str:
    digit = action.microbatch % 10
    if action.kind is ActionKind.FORWARD:
        return str(digit)
    return chr(ord("A" if action.kind is ActionKind.WEIGHT_GRADIENT else "a") + digit)


def _filling(kind: ActionKind) -> str:
    match kind:
        case ActionKind.FORWARD:
            return "-"
        case ActionKind.BACKWARD:
            return "="
        case ActionKind.INPUT_GRADIENT:
            return "+"
        case ActionKind.WEIGHT_GRADIENT:
            return "~"
        case ActionKind.SEND_F | ActionKind.RECV_F | ActionKind.SEND_B | ActionKind.RECV_B:
            return " "
        case _:
            assert_never(kind)


def draw(timeline: Timeline, *, num_ranks: int, width: int) -> str:
    """One line per rank, `rank 0 │...│`, in at most `width` columns (but not fewer than ten for the times)."""
    names = frame(num_ranks)
    columns = max(_LEAST_COLUMNS, width - len(names[0]) - 2)
    lines = cells(timeline, num_ranks=num_ranks, columns=columns)
    return "\n".join(f"{name}│{''.join(cell.text for cell in line)}│" for name, line in zip(names, lines, strict=True))


def frame(num_ranks: int) -> tuple[str, ...]:
    """What stands before the line of each rank."""
    digits = len(str(num_ranks - 1))
    return tuple(f"rank {rank:>{digits}} " for rank in range(num_ranks))


def legend(timeline: Timeline, lines: Sequence[Sequence[Cell]]) -> str:
    """What the signs in this picture mean, `cells` of that timeline."""
    words = {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.INPUT_GRADIENT: "gradient of values",
        ActionKind.WEIGHT_GRADIENT: "gradient of parameters",
    }
    there = {interval.action.kind for interval in timeline.intervals}
    parts = [f"{_filling(kind)} {word}" for kind, word in words.items() if kind in there]
    text = f"number of the micro-batch, then {', '.join([*parts, f'{IDLE} idle'])}"
    letters = {cell.text for line in lines for cell in line if cell.text.isalpha()}
    if any(letter.islower() for letter in letters):
        text += "; a narrow backward is a letter, a for 0"
    if any(letter.isupper() for letter in letters):
        text += "; a narrow gradient of parameters a capital, A for 0"
    return text
