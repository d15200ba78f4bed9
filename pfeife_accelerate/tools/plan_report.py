"""A plan for a person to read: stages, memory, the order to scale, how good it is, and what lost against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pfeife_accelerate.ir import ActionKind, CostGraph, Timeline
from pfeife_accelerate.planner.planned import Planned
from pfeife_accelerate.schedule.picture import cells, frame, legend
from pfeife_accelerate.tools.plan_choice import Attempt, Shape
from pfeife_accelerate.tools.sizes import format_bytes
from pfeife_accelerate.tools.tables import number_table

__all__ = ["memory_table", "print_attempts", "print_plan", "stage_table", "timeline_text"]

_COLOURS: Final = {
    ActionKind.FORWARD: "blue",
    ActionKind.BACKWARD: "green",
    ActionKind.INPUT_GRADIENT: "green",
    ActionKind.WEIGHT_GRADIENT: "yellow",
}

_MOST_ATTEMPTS: Final = 8  # that are shown


def print_plan(console: Console, planned: Planned, graph: CostGraph, *, all_reduce_s: float = 0.0) -> None:
    """Everything about one plan."""
    console.print(stage_table(planned, graph))
    console.print(memory_table(planned))
    console.print(timeline_text(planned.timeline, len(planned.schedule.per_rank), console.width), soft_wrap=True)
    for line in _summary(planned, all_reduce_s):
        console.print(Text(line), soft_wrap=True)
    if planned.runners_up:
        console.print("the best of the other families:")
    width = max((len(other.family) for other in planned.runners_up), default=0)
    for other in planned.runners_up:
        time = "-" if other.estimate_s is None else f"{_ms(other.estimate_s)} ms"
        console.print(Text(f"  {other.family:<{width}} {time:>12}  {other.why}"), soft_wrap=True)


def stage_table(planned: Planned, graph: CostGraph) -> Table:
    """One row for each stage, costs on one micro-batch."""
    headings = ("stage", "rank", "operations", "parameters", "forward ms", "backward ms", "kept")
    table = number_table(*headings, title="Stages")
    bounds = (0, *planned.cuts, len(graph.nodes))
    for stage, (rank, cost) in enumerate(zip(planned.stage_ranks, planned.stages, strict=True)):
        again = " (recomputed)" if stage in planned.recompute else ""
        table.add_row(
            str(stage),
            str(rank),
            f"{bounds[stage]}-{bounds[stage + 1] - 1}",
            format_bytes(cost.param_bytes),
            _ms(cost.forward_s),
            _ms(cost.backward_s),
            format_bytes(cost.saved_bytes) + again,
        )
    return table


def memory_table(planned: Planned) -> Table:
    """One row for each rank: what its peak consists of."""
    headings = ("rank", "parameters", "gradients, optimizer", "activations", "workspace", "messages", "peak", "limit")
    table = number_table(*headings, title="Memory at the peak")
    for rank, memory in enumerate(planned.memory):
        sizes = (
            memory.params_bytes,
            memory.state_bytes,
            memory.activation_bytes,
            memory.workspace_bytes,
            memory.buffer_bytes,
            memory.peak_bytes,
            memory.limit_bytes,
        )
        table.add_row(str(rank), *map(format_bytes, sizes))
    return table


def timeline_text(timeline: Timeline, num_ranks: int, width: int, *, scale_s: float | None = None) -> Text:
    """The order to scale, coloured where the console has colours; `scale_s` is the time that fills the width."""
    names = frame(num_ranks)
    columns = max(10, width - len(names[0]) - 2)
    if scale_s:
        columns = max(10, round(columns * timeline.makespan_s / scale_s))
    lines = cells(timeline, num_ranks=num_ranks, columns=columns)
    text = Text()
    for name, line in zip(names, lines, strict=True):
        text.append(f"{name}│")
        for cell in line:
            text.append(cell.text, style=_COLOURS[cell.kind] if cell.kind is not None else "dim")
        text.append("│\n")
    end = f"{_ms(timeline.makespan_s)} ms"
    text.append(" " * len(names[0]) + "0" + end.rjust(columns + 1) + "\n")
    text.append(legend(timeline, lines))
    return text


def _summary(planned: Planned, all_reduce_s: float) -> list[str]:
    spec, bound = planned.schedule.spec, planned.lower_bound
    per_rank = len(planned.stage_ranks) / max(1, len(planned.schedule.per_rank))
    lines = [
        f"order        {spec.family.value}, {spec.num_microbatches} micro-batches, {per_rank:g} stage(s) a rank",
        f"estimate     {_ms(planned.estimate_s)} ms a step",
        f"lower bound  {_ms(bound.seconds)} ms ({bound.kind.value})",
    ]
    if bound.seconds > 0:
        lines.append(f"gap          {100 * planned.gap:.1f} %")
    if all_reduce_s:
        lines.append(f"all-reduce   {_ms(all_reduce_s)} ms more, to add up the gradients of the replicas")
    return lines


def print_attempts(console: Console, attempts: Sequence[Attempt], best: Shape) -> None:
    """What other numbers of micro-batches and replicas gave."""
    times_s = {attempt.shape: attempt.step_s for attempt in attempts}
    best_s = times_s.get(best)
    if best_s is None or len(attempts) < 2:
        return
    others = [attempt for attempt in attempts if attempt.shape != best]
    console.print(f"also tried, compared by quick plans (that of the best took {_ms(best_s)} ms):")
    for attempt in others[:_MOST_ATTEMPTS]:
        why = attempt.problem.what if attempt.problem is not None else f"{_ms(attempt.step_s or 0.0)} ms"
        console.print(Text(f"  {attempt.shape}: {why}"), soft_wrap=True)
    if len(others) > _MOST_ATTEMPTS:
        console.print(f"  and {len(others) - _MOST_ATTEMPTS} more, slower or too large")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"
