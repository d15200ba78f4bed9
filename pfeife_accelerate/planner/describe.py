"""A plan as text for a person: its stages, its order, and what it should cost."""

from __future__ import annotations

from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.schedule.families import build
from pfeife_accelerate.schedule.render import render

__all__ = ["describe"]

_HEADER = ("stage", "rank", "operations", "parameters MB", "forward ms", "backward ms", "kept MB")


def describe(plan: PipelinePlan) -> str:
    """A table of the stages, the order of every rank, and the estimate."""
    rows = [
        (
            str(stage.index),
            str(stage.rank),
            str(stage.op_range[1] - stage.op_range[0]),
            f"{stage.cost.param_bytes / 1e6:.2f}",
            f"{stage.cost.forward_s * 1e3:.2f}",
            f"{stage.cost.backward_s * 1e3:.2f}",
            f"{stage.cost.saved_bytes / 1e6:.2f}",
        )
        for stage in plan.stages
    ]
    widths = [max(len(row[i]) for row in (_HEADER, *rows)) for i in range(len(_HEADER))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (_HEADER, *rows)]
    spec = plan.spec
    order = f"{spec.family.value}, {spec.num_microbatches} micro-batches, {spec.num_loops} stage(s) a rank"
    peaks = ", ".join(f"{peak / 1e6:.0f}" for peak in plan.estimate.peak_bytes)
    lines += [order, render(build(spec)), f"estimate: {plan.estimate.step_s * 1e3:.1f} ms a step, peak {peaks} MB"]
    return "\n".join(lines)
