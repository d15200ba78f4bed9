"""A plan as text for a person: its stages, its order, and what it should cost."""

from __future__ import annotations

from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.schedule.render import render

__all__ = ["describe"]

_HEADER = ("stage", "rank", "operations", "parameters MB", "forward ms", "backward ms", "kept MB")


def describe(plan: PipelinePlan) -> str:
    """A table of the stages, the order of every rank, and the estimate."""
    rows = [
        (
            str(index),
            str(rank),
            str(stage.op_range[1] - stage.op_range[0]),
            f"{stage.cost.param_bytes / 1e6:.2f}",
            f"{stage.cost.forward_s * 1e3:.2f}",
            f"{stage.cost.backward_s * 1e3:.2f}",
            f"{stage.cost.saved_bytes / 1e6:.2f}",
        )
        for index, (rank, stage) in enumerate(zip(plan.stage_ranks, plan.stages, strict=True))
    ]
    widths = [max(len(row[i]) for row in (_HEADER, *rows)) for i in range(len(_HEADER))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (_HEADER, *rows)]
    spec = plan.spec
    counts = sorted({plan.stage_ranks.count(rank) for rank in range(plan.num_ranks)})
    a_rank = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    order = f"{spec.family.value}, {spec.num_microbatches} micro-batches, {a_rank} stage(s) a rank"
    peaks = ", ".join(f"{peak / 1e6:.0f}" for peak in plan.peak_bytes)
    lines += [order, render(plan.schedule), f"estimate: {plan.estimate_s * 1e3:.1f} ms a step, peak {peaks} MB"]
    return "\n".join(lines)
