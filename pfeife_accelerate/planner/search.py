"""The plan: every candidate order on the best equal-time slicing, simulated, and the fastest that fits.

Models: gpipe, 1F1B with every prefetch, looped with few loops; stage s on rank s mod D.
Ignores for now: moving the cuts to suit the order, other placements, prefetch per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.ir import (
    CostTable,
    Machine,
    MemoryCurve,
    OpGraph,
    PipelinePlan,
    ScheduleFamily,
    ScheduleSpec,
    Slicing,
    StageSpec,
    parse_family,
)
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.planner.memory import peak_memory
from pfeife_accelerate.planner.simulate import simulate
from pfeife_accelerate.planner.slicing import cuts_at, equal_memory, equal_time, legal_cuts
from pfeife_accelerate.planner.stage_costs import edges_of, message_bytes_of, messages_of, stage_costs, stage_params
from pfeife_accelerate.schedule import build, chain_messages, is_executable, lower

__all__ = ["SearchOptions", "make_plan"]

_LOG = get_logger(__name__)
_LOOPS = (1, 2)  # what "auto" tries


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What the user fixes about the plan; None and "auto" leave it to the search."""

    num_microbatches: int | None = None  #: read by the session, which cuts the batch before there is a graph to plan
    schedule: str = "auto"  #: "auto", "gpipe", "1f1b" or "looped"
    num_loops: int | None = None  #: stages per rank
    microbatches_per_loop: int | None = None  #: looped only
    prefetch_forwards: int | None = None  #: extra forwards before the first backward
    split_points: tuple[str, ...] = ()  #: modules or operations where the stages after the first start
    state_multiplier: float = 4.0  #: bytes of parameter + gradient + optimizer state per byte of parameter
    memory_fraction: float = 0.9  #: share of a device's memory that a plan may use

    @property
    def family(self) -> ScheduleFamily | None:
        """The family asked for, None for "auto"."""
        return None if self.schedule.lower() == "auto" else parse_family(self.schedule)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What a plan is wanted for."""

    graph: OpGraph
    costs: CostTable
    machine: Machine
    num_ranks: int
    num_microbatches: int
    options: SearchOptions


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """An order on a slicing, proved to run, with its simulated time and memory."""

    slicing: Slicing
    spec: ScheduleSpec
    step_s: float
    memory: MemoryCurve

    @property
    def merit(self) -> tuple[float, int]:
        """What to minimise. Sums in another order differ in the last bits: those are equal, and less memory wins."""
        return float(f"{self.step_s:.9e}"), max(self.memory.peak_bytes)


def make_plan(
    graph: OpGraph,
    costs: CostTable,
    machine: Machine,
    num_ranks: int,
    num_microbatches: int,
    options: SearchOptions | None = None,
) -> PipelinePlan:
    """The fastest plan that can run and fits; `costs` are for one of the `num_microbatches` micro-batches."""
    problem = _Problem(
        graph=graph,
        costs=costs,
        machine=machine,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        options=options or SearchOptions(),
    )
    found = list(_candidates(problem, by_memory=False))
    fitting = [candidate for candidate in found if not _excess(problem, candidate)]
    if not fitting and not problem.options.split_points:
        found += _candidates(problem, by_memory=True)
        fitting = [candidate for candidate in found if not _excess(problem, candidate)]
    if not found:
        raise _nothing_runs(problem)
    if not fitting:
        raise _does_not_fit(problem, found)
    best = min(fitting, key=lambda candidate: candidate.merit)
    _LOG.info("plan: %s, cuts %s, %.4g s a step", best.spec, best.slicing.cuts, best.step_s)
    return _plan(problem, best)


def _candidates(problem: _Problem, *, by_memory: bool) -> Iterator[_Candidate]:
    for num_loops in _loops(problem):
        slicing = _slicing(problem, num_loops, by_memory=by_memory)
        stage_ranks = tuple(stage % problem.num_ranks for stage in range(problem.num_ranks * num_loops))
        stages = stage_costs(problem.graph, problem.costs, slicing.cuts)
        messages = messages_of(problem.graph, slicing.cuts, stage_ranks)
        sizes = message_bytes_of(problem.graph, slicing.cuts, stage_ranks)
        for spec in _specs(problem, num_loops):
            schedule = build(spec)
            # The chain stands for every possible skip connection; what a short last batch needs is proved the same way.
            if is_executable(schedule, chain_messages(stage_ranks)):
                yield _Candidate(
                    slicing=slicing,
                    spec=spec,
                    step_s=simulate(schedule, stages, messages, sizes, problem.machine).makespan_s,
                    memory=peak_memory(schedule, stages, state_multiplier=problem.options.state_multiplier),
                )


def _slicing(problem: _Problem, num_loops: int, *, by_memory: bool) -> Slicing:
    slicer = equal_memory if by_memory else equal_time
    if problem.options.split_points:
        return cuts_at(problem.graph, problem.options.split_points, problem.num_ranks * num_loops)
    return slicer(
        problem.graph,
        problem.costs,
        problem.machine,
        problem.num_ranks * num_loops,
        state_multiplier=problem.options.state_multiplier,
    )


def _loops(problem: _Problem) -> tuple[int, ...]:
    """Stages per rank to try."""
    options = problem.options
    if options.num_loops is not None:
        return (options.num_loops,)
    if options.split_points:  # they say how many stages there are
        return (max(1, (len(options.split_points) + 1) // problem.num_ranks),)
    if options.family is ScheduleFamily.ONE_F_ONE_B:
        return (1,)
    most = len(legal_cuts(problem.graph)) + 1
    # A lone rank gains nothing by looping; one loop is always tried, so that too few cuts are an error, not a silence.
    return tuple(v for v in _LOOPS if v == 1 or (problem.num_ranks > 1 and v * problem.num_ranks <= most))


def _specs(problem: _Problem, num_loops: int) -> Iterator[ScheduleSpec]:
    """Orders to try. A family that the user names meets all the user's numbers, and refuses those it has no use for."""
    options, ranks, microbatches = problem.options, problem.num_ranks, problem.num_microbatches
    family, per_loop, prefetch = options.family, options.microbatches_per_loop, options.prefetch_forwards
    base = ScheduleSpec(
        family=ScheduleFamily.GPIPE, num_ranks=ranks, num_microbatches=microbatches, num_loops=num_loops
    )
    prefetches = range(ranks) if prefetch is None else (prefetch,)
    if family is ScheduleFamily.GPIPE or (family is None and per_loop is None and not prefetch):
        yield replace(base, microbatches_per_loop=per_loop, prefetch_forwards=prefetch or 0)
    if family is ScheduleFamily.ONE_F_ONE_B or (family is None and per_loop is None and num_loops == 1):
        for forwards in prefetches:
            yield replace(
                base,
                family=ScheduleFamily.ONE_F_ONE_B,
                microbatches_per_loop=per_loop,
                prefetch_forwards=forwards,
            )
    if family is ScheduleFamily.LOOPED or (family is None and (per_loop is not None or num_loops > 1)):
        blocks = {size for size in (ranks, 2 * ranks, microbatches) if size <= microbatches}
        for block in sorted(blocks) if per_loop is None else (per_loop,):
            for forwards in prefetches:
                yield replace(
                    base,
                    family=ScheduleFamily.LOOPED,
                    microbatches_per_loop=block,
                    prefetch_forwards=forwards,
                )


def _plan(problem: _Problem, best: _Candidate) -> PipelinePlan:
    graph, cuts = problem.graph, best.slicing.cuts
    ranges = best.slicing.ranges(len(graph.nodes))
    stages = tuple(
        StageSpec(op_range=op_range, params=params, cost=cost)
        for op_range, params, cost in zip(
            ranges, stage_params(graph, cuts), stage_costs(graph, problem.costs, cuts), strict=True
        )
    )
    schedule = build(best.spec)
    return PipelinePlan(
        graph_fingerprint=graph.fingerprint,
        cuts=cuts,
        stage_ranks=schedule.stage_ranks,
        per_rank=tuple(tuple(str(action) for action in actions) for actions in schedule.per_rank),
        estimate_s=best.step_s,
        peak_bytes=best.memory.peak_bytes,
        spec=best.spec,
        stages=stages,
        edges=edges_of(graph, cuts),
    )


# -- refusals ----------------------------------------------------------------------------------------------------------


def _limit(problem: _Problem, rank: int) -> int:
    return int(problem.machine.device_of(rank).memory_bytes * problem.options.memory_fraction)


def _excess(problem: _Problem, candidate: _Candidate) -> dict[int, int]:
    """Bytes too many, for each rank that has too many."""
    over = {rank: peak - _limit(problem, rank) for rank, peak in enumerate(candidate.memory.peak_bytes)}
    return {rank: num_bytes for rank, num_bytes in over.items() if num_bytes > 0}


def _does_not_fit(problem: _Problem, found: list[_Candidate]) -> PfeifeError:
    nearest = min(found, key=lambda candidate: max(_excess(problem, candidate).values()))
    excess = _excess(problem, nearest)
    rows = [
        f"rank {rank} needs {nearest.memory.peak_bytes[rank]} bytes ({nearest.memory.static_bytes[rank]} of them "
        f"parameters, gradients, optimizer state), may use {_limit(problem, rank)}: {num_bytes} too many"
        for rank, num_bytes in excess.items()
    ]
    total = sum(nearest.memory.peak_bytes)
    smallest = min(_limit(problem, rank) for rank in range(problem.num_ranks))
    return PfeifeError(
        id="PF302",
        what=f"no plan fits into memory; the nearest one exceeds it on {len(excess)} of {problem.num_ranks} ranks",
        where="\n".join(rows),
        why=f"all stages together need {total} bytes, the devices give {smallest} each",
        hints=(
            f"at least {max(problem.num_ranks + 1, -(-total // max(smallest, 1)))} processes",
            "more micro-batches, so that each is smaller",
        ),
    )


def _nothing_runs(problem: _Problem) -> PfeifeError:
    """Every order was refused as a deadlock: draw the first one."""
    num_loops = _loops(problem)[0]
    schedule = build(next(_specs(problem, num_loops)))
    try:
        lower(schedule, chain_messages(schedule.stage_ranks))
    except PfeifeError as error:
        return error
    return InternalError(id="PF311", what="an order was refused that can run", where=str(schedule.spec))
