"""The search's result as the plan that ranks follow and other programs read.

Models: what the search leaves out because a cost graph has no names: the parameters of each stage, and the tensors that
leave it. Ignores: costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from pfeife_accelerate.ir import Edge, Machine, OpGraph, PipelinePlan, Slicing, StageSpec
from pfeife_accelerate.planner.planned import Planned

__all__ = ["edges_of", "pipeline_plan", "stage_params"]


def pipeline_plan(
    planned: Planned, ops: OpGraph | None = None, machine: Machine | None = None, copied: Collection[int] = ()
) -> PipelinePlan:
    """The plan as data. Without the operations by name, `params` and `edges` are empty.

    `machine`, that it was made for, lets others tell what they measure from what was expected. `copied` are operations
    whose value each reading stage computes anew.
    """
    ranges = Slicing(cuts=planned.cuts).ranges(planned.num_operations)
    params = stage_params(ops, planned.cuts) if ops is not None else ((),) * len(ranges)
    return PipelinePlan(
        graph_fingerprint=planned.graph_fingerprint,
        cuts=planned.cuts,
        stage_ranks=planned.stage_ranks,
        per_rank=tuple(tuple(str(action) for action in actions) for actions in planned.schedule.per_rank),
        recompute=planned.recompute,
        estimate_s=planned.estimate_s,
        lower_bound_s=planned.lower_bound_s,
        peak_bytes=planned.peak_bytes,
        spec=planned.schedule.spec,
        stages=tuple(
            StageSpec(op_range=op_range, params=names, cost=cost)
            for op_range, names, cost in zip(ranges, params, planned.stages, strict=True)
        ),
        edges=edges_of(ops, planned.cuts, copied) if ops is not None else (),
        machine=machine,
        copied_values=tuple(ops.nodes[index].name for index in sorted(copied)) if ops is not None else (),
    )


def stage_params(graph: OpGraph, cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that each stage reads, in order of first use."""
    return tuple(
        tuple(dict.fromkeys(name for node in graph.nodes[first:last] for name in node.params))
        for first, last in Slicing(cuts=tuple(cuts)).ranges(len(graph.nodes))
    )


def _reading_stages(graph: OpGraph, cuts: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(operation, its stage, later stages that read it) of every tensor that leaves its stage."""
    stage_of = [bisect_right(cuts, index) for index in range(len(graph.nodes))]
    leaving = []
    for index, reads in enumerate(graph.readers):
        stages = tuple(sorted({stage_of[read] for read in reads} - {stage_of[index]}))
        if stages and graph.nodes[index].outputs:
            leaving.append((index, stage_of[index], stages))
    return leaving


def edges_of(graph: OpGraph, cuts: Sequence[int], copied: Collection[int] = ()) -> tuple[Edge, ...]:
    """Every tensor that leaves its stage, in order of production, without those that are `copied`."""
    edges: list[Edge] = []
    for index, producer, consumers in _reading_stages(graph, cuts):
        if index in copied:
            continue
        node = graph.nodes[index]
        names = [node.name] if len(node.outputs) == 1 else [f"{node.name}.{i}" for i in range(len(node.outputs))]
        edges += (
            Edge(producer=producer, consumers=consumers, value=name, spec=spec)
            for name, spec in zip(names, node.outputs, strict=True)
        )
    return tuple(edges)
