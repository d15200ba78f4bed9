"""The plan as the file that the runtime and other programs read."""

from __future__ import annotations

from pathlib import Path

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, OpGraph, PipelinePlan, Slicing, StageSpec, to_json
from pfeife_accelerate.planner.planned import Planned
from pfeife_accelerate.planner.stage_costs import edges_of, stage_params

__all__ = ["pipeline_plan", "write_plan"]


def pipeline_plan(planned: Planned, graph: CostGraph, op_graph: OpGraph | None) -> PipelinePlan:
    """The plan as data. A cost graph alone knows no names: then `params` and `edges` are empty."""
    ranges = Slicing(cuts=planned.cuts).ranges(len(graph.nodes))
    params = stage_params(op_graph, planned.cuts) if op_graph is not None else ((),) * len(ranges)
    return PipelinePlan(
        graph_fingerprint=graph.fingerprint,
        cuts=planned.cuts,
        stage_ranks=planned.stage_ranks,
        per_rank=tuple(tuple(str(action) for action in actions) for actions in planned.schedule.per_rank),
        recompute=planned.recompute,
        estimate_s=planned.estimate_s,
        lower_bound_s=planned.lower_bound.seconds,
        peak_bytes=tuple(memory.peak_bytes for memory in planned.memory),
        spec=planned.schedule.spec,
        stages=tuple(
            StageSpec(op_range=op_range, params=names, cost=cost)
            for op_range, names, cost in zip(ranges, params, planned.stages, strict=True)
        ),
        edges=edges_of(op_graph, planned.cuts) if op_graph is not None else (),
    )


def write_plan(path: Path, plan: PipelinePlan) -> None:
    """Write it as JSON.

    Raises: PfeifeError PF143 where the file cannot be written.
    """
    try:
        path.write_text(to_json(plan), encoding="utf-8")
    except OSError as error:
        raise PfeifeError(id="PF143", what=f"the plan cannot be written to {path}", why=str(error)) from error
