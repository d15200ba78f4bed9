"""The rows of the paper's table, simulated: each figure beside ours, who wins by how much, and our own best plan.

Models: every figure by the engine that it was measured with, on the same costs; ratios of Pfeife to the others; what
prefetch and looping gain. Ignores: how it is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pfeife_accelerate.ir import CostGraph
from pfeife_accelerate.planner import Planned, SearchOptions, make_plan
from pfeife_accelerate.tools.plan_choice import Choice, choose, shapes
from pfeife_accelerate.tools.reproduce_plans import Pipeline, even, interleaved, pfeife, run_on
from pfeife_accelerate.tools.reproduce_settings import (
    FITTED,
    Setting,
    authors_machine,
    figures_of,
    planning_machine,
    simulated_machine,
)
from pfeife_accelerate.tools.reproduce_sharded import sharded
from pfeife_accelerate.zoo import GAINS, PaperGain
from pfeife_accelerate.zoo.paper import System

__all__ = [
    "ABSOLUTE", "RELATIVE", "Best", "Comparison", "Gain", "GraphOf", "Line", "Row", "deviation", "gains", "row",
]  # fmt: skip

#: What the table aims at: items/s, and ratios of them, may be off by so much.
ABSOLUTE: Final = 0.25
RELATIVE: Final = 0.10
_ELEMENT_BYTES: Final = {"fp16": 2, "fp32": 4}
_STAGES: Final = {System.ZERO2: 2, System.ZERO3: 3}
_BEST: Final = SearchOptions(backward="split", recompute="auto")

#: The cost graph of a setting at a number of rows.
GraphOf = Callable[[Setting, int], CostGraph]


def deviation(ours: float, theirs: float) -> float:
    """How far ours is from theirs, as a share of theirs."""
    return ours / theirs - 1


@dataclass(frozen=True, kw_only=True)
class Line:
    """One system of a row; without a system it is ours to show, and the paper has no figure for it."""

    system: str
    how: str
    items_per_s: float
    peak_bytes: float
    limit_bytes: float
    paper: float | None = None
    paper_has_it: bool = True
    is_fitted: bool = False

    @property
    def fits(self) -> bool:
        """Into the device's memory."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def meets(self) -> bool:
        """Whether it is as near to the paper's figure as is aimed at; both out of memory is."""
        if self.paper is None or not self.fits:
            return not self.paper_has_it or (self.paper is None) == (not self.fits)
        return abs(deviation(self.items_per_s, self.paper)) <= ABSOLUTE


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Pfeife's items/s over another's."""

    other: str
    paper: float
    ours: float

    @property
    def meets(self) -> bool:
        """Whether the ratio is as near as is aimed at."""
        return abs(deviation(self.ours, self.paper)) <= RELATIVE


@dataclass(frozen=True, kw_only=True)
class Best:
    """What our own planner and runtime reach on the same batch."""

    items_per_s: float
    how: str
    peak_bytes: float
    over: float  #: the best that the others of the row reach in the same simulator


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting."""

    setting: Setting
    lines: tuple[Line, ...]
    comparisons: tuple[Comparison, ...]
    best: Best


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a part of the method saves of a step's latency."""

    paper: PaperGain
    ours: float

    @property
    def meets(self) -> bool:
        """By the ratio of latencies, with and without."""
        return abs(deviation(1 - self.ours, 1 - self.paper.share)) <= RELATIVE


def row(setting: Setting, graph_of: GraphOf, tell: Callable[[str], None] = lambda _: None) -> Row:
    """Simulate a setting."""
    lines = []
    for figure in figures_of(setting):
        tell(f"{setting.name}: {figure.system.value}")
        is_fitted = (setting.name, figure.system.name) in FITTED
        lines.append(replace(_line(setting, figure.system, graph_of), paper=figure.items_per_s, is_fitted=is_fitted))
        if figure.system is System.COLOSSAL_AI:
            graph, machine = graph_of(setting, setting.rows), simulated_machine(setting.num_devices)
            microbatches, devices = setting.num_microbatches, setting.num_devices
            other = interleaved(graph, machine, microbatches, devices, setting.num_loops or 2)
            name = f"{figure.system.value}, interleaved"
            lines.append(replace(_of_pipeline(setting, name, other), paper_has_it=False))
    tell(f"{setting.name}: our best plan")
    return Row(
        setting=setting,
        lines=tuple(lines),
        comparisons=_comparisons(lines),
        best=_best(setting, graph_of, max((line.items_per_s for line in lines if line.fits), default=0.0)),
    )


def gains(setting: Setting, graph_of: GraphOf) -> tuple[Gain, ...]:
    """What prefetch and looping save, each with the best cuts for it, in the authors' program."""
    graph, devices = graph_of(setting, setting.rows), setting.num_devices
    plan = partial(pfeife, graph, planning_machine(devices), setting.num_microbatches, devices)
    without, prefetched, looped = (
        run_on(pipeline, graph, authors_machine(devices)).step_s
        for pipeline in (plan(loops=1, prefetch=0), plan(loops=1), plan(loops=setting.num_loops))
    )
    found = {"prefetch": 1 - prefetched / without, "looping": 1 - looped / prefetched}
    return tuple(Gain(paper=gain, ours=found[gain.part]) for gain in GAINS if gain.model == setting.model)


def _line(setting: Setting, system: System, graph_of: GraphOf) -> Line:
    devices, machine = setting.num_devices, simulated_machine(setting.num_devices)
    if system in _STAGES:
        rows = -(-setting.batch // devices)
        step = sharded(
            graph_of(setting, rows),
            machine.link,
            stage=_STAGES[system],
            num_devices=devices,
            element_bytes=_ELEMENT_BYTES[setting.precision],
        )
        return Line(
            system=system.value,
            how=f"{rows} row{'' if rows == 1 else 's'} a device, {step.waiting_s * 1e3:.0f} ms of waiting",
            items_per_s=rows * devices / step.step_s,
            peak_bytes=step.peak_bytes,
            limit_bytes=machine.device_of(0).memory_bytes,
        )
    graph, microbatches = graph_of(setting, setting.rows), setting.num_microbatches
    if system is not System.PFEIFE:
        return _of_pipeline(setting, system.value, even(graph, machine, microbatches, devices))
    found = pfeife(graph, planning_machine(devices), microbatches, devices, loops=setting.num_loops)
    return _of_pipeline(setting, system.value, run_on(found, graph, authors_machine(devices)))


def _of_pipeline(setting: Setting, system: str, pipeline: Pipeline) -> Line:
    return Line(
        system=system,
        how=pipeline.order,
        items_per_s=setting.batch / pipeline.step_s,
        peak_bytes=pipeline.peak_bytes,
        limit_bytes=pipeline.machine.device_of(0).memory_bytes,
    )


def _comparisons(lines: list[Line]) -> tuple[Comparison, ...]:
    ours = next((line for line in lines if line.system == System.PFEIFE.value), None)
    if ours is None or ours.paper is None:
        return ()
    return tuple(
        Comparison(other=line.system, paper=ours.paper / line.paper, ours=ours.items_per_s / line.items_per_s)
        for line in lines
        if line is not ours and line.paper is not None and line.fits
    )


def _best(setting: Setting, graph_of: GraphOf, others: float) -> Best:
    """All families, backward in halves, recomputation, any number of micro-batches, replicas of shorter pipelines."""
    machine = simulated_machine(setting.num_devices)

    def search(graph: CostGraph, num_ranks: int, num_microbatches: int, effort: str) -> Planned:
        return make_plan(graph, machine, num_ranks, num_microbatches, replace(_BEST, effort=effort))

    found = choose(
        shapes(batch=setting.batch, num_ranks=setting.num_devices, num_microbatches=None, num_replicas=None),
        lambda rows: graph_of(setting, rows),
        search,
        machine,
        setting.num_devices,
        effort="full",
        tell=lambda _: None,
    )
    speed = setting.batch / found.step_s
    return Best(
        items_per_s=speed,
        how=_described(found),
        peak_bytes=max(found.planned.peak_bytes),
        over=speed / others if others else 0.0,
    )


def _described(found: Choice) -> str:
    planned = found.planned
    stages = len(planned.stage_ranks) / len(planned.schedule.per_rank)
    again = f", {len(planned.recompute)} stages recompute" if planned.recompute else ""
    return f"{found.shape}, {planned.schedule.spec.family.value}, {stages:g} stages a rank{again}"
