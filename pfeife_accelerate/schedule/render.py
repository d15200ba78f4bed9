"""Schedules as text, for people, tests and torch's visualiser.

Models: the compute actions in their order. Ignores: transfers (a compute-only picture is what one can read).
"""

from __future__ import annotations

import csv
import io

from pfeife_accelerate.ir.actions import Schedule

__all__ = ["render", "render_lowered", "to_csv"]


def render(schedule: Schedule) -> str:
    """One line per rank: `rank 0  0F0 0F1 0B0 ...`, transfers left out."""
    return _lines(schedule, with_transfers=False)


def render_lowered(schedule: Schedule) -> str:
    """One line per rank with every action, transfers included."""
    return _lines(schedule, with_transfers=True)


def _lines(schedule: Schedule, *, with_transfers: bool) -> str:
    width = len(str(schedule.num_ranks - 1))
    return "\n".join(
        f"rank {rank:>{width}}  " + " ".join(str(a) for a in actions if with_transfers or a.kind.is_compute)
        for rank, actions in enumerate(schedule.per_rank)
    )


def to_csv(schedule: Schedule) -> str:
    """The compute-only CSV of `torch.distributed.pipelining`: one row per rank, one cell per action."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in schedule.per_rank:
        writer.writerow([str(action) for action in actions if action.kind.is_compute])
    return text.getvalue()
