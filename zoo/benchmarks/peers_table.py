"""The peers' document: a table of each cell, the targets, and what it was measured with.

Models: medians as they were recorded, those that miss a target too. Ignores: measuring (`peers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from peers_record import ACCUMULATION, AUTO, FIXED, PIPELINES, PLAIN, Cell, Found
from rich.table import Table

__all__ = ["markdown", "rich_table"]

COLUMNS = ("", "steps", "s a step", "x plain", "x accumulation", "best peer / it", "peak MB per rank", "first losses")
ORDER = (PLAIN, ACCUMULATION, *PIPELINES, "DDP", "FSDP2", FIXED, AUTO)


def rows(cell: Cell) -> Iterator[tuple[str, ...]]:
    """The lines of a cell's table."""
    names = [name for name in ORDER if name in cell.found or name in cell.failures]
    others = [name for name in (*cell.found, *cell.failures) if name not in names]
    for name in [*names, *others]:
        if name in cell.found:
            yield _row(cell, name, cell.found[name])
        else:
            yield (name, "0", f"cannot: {cell.failures[name]}", *[""] * (len(COLUMNS) - 3))


def _row(cell: Cell, name: str, found: Found) -> tuple[str, ...]:
    right = {True: "right", False: "WRONG", None: "not comparable"}[cell.has_right_losses(name)]
    return (
        name,
        str(len(found.seconds)),
        f"{found.median_s:.3f}",
        _speed(cell.found.get(PLAIN), found),
        _speed(cell.found.get(ACCUMULATION), found),
        _speed(cell.found.get(cell.best_peer or ""), found),
        " / ".join(f"{number:.0f}" for number in found.peak_mb),
        right,
    )


def _speed(other: Found | None, found: Found) -> str:
    return "" if other is None else f"{other.median_s / found.median_s:.2f}"


def rich_table(cell: Cell) -> Table:
    """A cell for the terminal."""
    table = Table(title=_title(cell))
    for column in COLUMNS:
        table.add_column(column, no_wrap=not column)
    for row in rows(cell):
        table.add_row(*row, style="bold" if row[0] in (FIXED, AUTO) else None)
    return table


def _title(cell: Cell) -> str:
    return f"{cell.model}, {cell.rows} rows, {cell.num_microbatches} micro-batches"


def markdown(cells: Sequence[Cell]) -> str:
    """The whole document."""
    lines = [
        "# Peers",
        "",
        "Two ranks with one thread each over gloo, fp32, AdamW. All contestants of a table take turns, of three steps,",
        "of which the first finds cold caches and does not count; medians of whole steps, from the first rank's start",
        "to the last rank's end. Which pages of memory a process gets at its start makes its steps differ for as long",
        "as it lives, by up to 18 %: memory is compacted before, and all that is compared starts several times, in",
        "another order each time. The peers' stages are cut by hand, balanced by measured times of the layers. Peers",
        "that are clearly slower than the best one are not measured in every round. *Plain* is one process with one",
        "thread. Memory is the most of a rank's resident memory during steps, above what it holds after imports.",
        "*First losses*: those of the first two steps equal plain training's (accumulation's over the same",
        "micro-batches for a model with BatchNorm). This package's processes have large pages",
        "(`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`), as `accelerate launch` starts them; two of the peers are measured",
        "with them too.",
        "",
        *_targets(cells),
    ]
    for cell in cells:
        lines += ["", f"## {_title(cell)}", "", _line(COLUMNS), _line(["---", *["--:"] * (len(COLUMNS) - 2), "---"])]
        lines += [_line(row) for row in rows(cell)]
        lines += ["", *_plans(cell)]
    lines += ["", "## Measured with", ""]
    for about in {tuple(cell.surroundings.items()): None for cell in cells}:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in about))
    lines += ["", *(f"    {command}" for command in {cell.command: None for cell in cells}), ""]
    return "\n".join(lines)


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(value.replace('|', '/') for value in values)} |"


def _targets(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## Targets"
    yield ""
    yield "*Memory over* compares the largest ranks; the peers are the fastest and the leanest pipeline."
    yield ""
    yield "| model | micro-batches | | reached | target | |"
    yield "|---|--:|---|--:|--:|---|"
    for cell in cells:
        for check in cell.checks():
            sign = "at least" if check.at_least else "at most"
            reached = "-" if math.isnan(check.reached) else f"{check.reached:.3f}"
            met = "met" if check.is_met else "**missed**"
            wanted = f"{sign} {check.target:g}"
            yield f"| {cell.model} | {cell.num_microbatches} | {check.name} | {reached} | {wanted} | {met} |"


def _plans(cell: Cell) -> Iterator[str]:
    for name in (FIXED, AUTO):
        found = cell.found.get(name)
        if found and found.plan:
            plan = found.plan
            yield (
                f"- {name}: {plan['family']}, {plan['num_stages']} stages, {plan['num_microbatches']} micro-batches; "
                f"{plan['estimate_s']:.3f} s estimated, {found.median_s:.3f} s recorded."
            )
