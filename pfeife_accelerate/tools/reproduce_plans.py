"""Plans as the paper's pipelines ran them: even 1F1B, interleaved 1F1B, and the looped 1F1B of Pfeife's search.

Models: what each engine would run on the same costs, in the planner's own simulator, whatever it needs; whether that
fits into memory is told apart. Ignores: engines' own memory beside the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, Machine, ScheduleFamily
from pfeife_accelerate.planner import Planned, Problem, SearchOptions, make_plan
from pfeife_accelerate.planner.shapes import equal_time_cuts

__all__ = ["Pipeline", "even", "interleaved", "peak_share", "pfeife", "run_on"]

_LOOPS: Final = (1, 2, 3)  # that Pfeife's search tries
_LIMIT: Final = 0.85  # of the device's memory, in its search
_BOUNDLESS: Final = 1 << 50


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A plan and the machine that it was simulated on."""

    planned: Planned
    machine: Machine

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.planned.estimate_s

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(self.planned.peak_bytes)

    @property
    def order(self) -> str:
        """As people call it."""
        spec = self.planned.schedule.spec
        loops = f", {spec.num_loops} loops" if spec.num_loops > 1 else ""
        ahead = f", {spec.prefetch_forwards} prefetched" if spec.prefetch_forwards else ""
        return f"{'1f1b' if spec.num_loops == 1 else spec.family.value}{loops}{ahead}"


def even(graph: CostGraph, machine: Machine, num_microbatches: int, num_ranks: int) -> Pipeline:
    """1F1B on stages of equal time, nothing prefetched: DeepSpeed's engine, and Colossal-AI's default."""
    options = SearchOptions(schedule="1f1b", prefetch_forwards=0)
    return _evenly(graph, machine, num_microbatches, num_ranks, options, 1)


def interleaved(graph: CostGraph, machine: Machine, num_microbatches: int, num_ranks: int, loops: int) -> Pipeline:
    """Megatron's interleaved 1F1B on stages of equal time."""
    options = SearchOptions(schedule="interleaved", num_loops=loops)
    return _evenly(graph, machine, num_microbatches, num_ranks, options, loops)


def _evenly(
    graph: CostGraph, machine: Machine, num_microbatches: int, num_ranks: int, options: SearchOptions, loops: int
) -> Pipeline:
    boundless = _boundless(machine)
    problem = Problem(
        graph=graph, machine=boundless, num_ranks=num_ranks, num_microbatches=num_microbatches, options=options
    )
    cuts = tuple(equal_time_cuts(problem, num_ranks * loops).tolist())
    options = replace(options, cuts=cuts, effort="quick")
    return Pipeline(planned=make_plan(graph, boundless, num_ranks, num_microbatches, options), machine=machine)


def pfeife(
    graph: CostGraph,
    machine: Machine,
    num_microbatches: int,
    num_ranks: int,
    *,
    loops: int | None = None,
    prefetch: int | None = None,
) -> Pipeline:
    """The fastest looped 1F1B by estimate, cuts and order found together, as Pfeife's search looks for it.

    Raises: PfeifeError PF302 where none fits into the share of memory that it allows itself.
    """
    found, failure = [], None
    for number in _LOOPS if loops is None else (loops,):
        options = SearchOptions(schedule="looped", num_loops=number, prefetch_forwards=prefetch, memory_fraction=_LIMIT)
        try:
            found.append(make_plan(graph, machine, num_ranks, num_microbatches, options))
        except PfeifeError as error:
            failure = error
    if not found:
        assert failure is not None
        raise failure
    return Pipeline(planned=min(found, key=lambda planned: planned.estimate_s), machine=machine)


def run_on(pipeline: Pipeline, graph: CostGraph, machine: Machine) -> Pipeline:
    """The same plan on another machine."""
    spec = pipeline.planned.schedule.spec
    is_looped = spec.family is ScheduleFamily.LOOPED
    options = SearchOptions(
        schedule=spec.family.value,
        num_loops=spec.num_loops,
        microbatches_per_loop=spec.microbatches_per_loop if is_looped else None,
        prefetch_forwards=spec.prefetch_forwards,
        cuts=pipeline.planned.cuts,
        effort="quick",
    )
    planned = make_plan(graph, _boundless(machine), spec.num_ranks, spec.num_microbatches, options)
    return Pipeline(planned=planned, machine=machine)


def peak_share(peak_bytes: float, machine: Machine) -> float:
    """Of a device's memory."""
    return peak_bytes / machine.device_of(0).memory_bytes


def _boundless(machine: Machine) -> Machine:
    return replace(machine, devices=(replace(machine.device_of(0), memory_bytes=_BOUNDLESS),))
