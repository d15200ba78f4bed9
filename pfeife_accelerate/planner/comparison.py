"""A plan held against what was recorded: idle time of each rank, and how far off the times of stages and links were.

Models: medians over all recorded steps; a transfer's own time, without its wait for the link.
Ignores: why they differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from pfeife_accelerate.ir import ActionKind, DeviceSpec, Interval, LinkSpec, Machine, PipelinePlan, Timeline
from pfeife_accelerate.ir.trace import Trace
from pfeife_accelerate.planner.simulate import MessageBytes, simulate
from pfeife_accelerate.schedule import by_first_reader, chain_messages, for_microbatches, lower, messages_between

__all__ = [
    "Comparison", "LinkComparison", "RankComparison", "StageComparison", "compare", "idle_share", "own_times",
    "planned_timeline",
]  # fmt: skip

_FREE_DEVICE = DeviceSpec(name="", memory_bytes=0, flops_per_s=(), bytes_per_s=1.0, launch_s=0.0)
_FREE = Machine(devices=(_FREE_DEVICE,), link=LinkSpec(latency_s=0.0, bytes_per_s=float("inf")))


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """Seconds as planned and as recorded; `planned_s` is None where the plan does not say."""

    planned_s: float | None
    recorded_s: float

    @property
    def error(self) -> float | None:
        """How much longer it took than planned, as a share of the plan's time; None where that is 0 or unknown."""
        return self.recorded_s / self.planned_s - 1 if self.planned_s else None


@dataclass(frozen=True, kw_only=True)
class StageComparison(_Difference):
    """One kind of computation of one stage, on one micro-batch."""

    stage: int
    rank: int
    kind: ActionKind


@dataclass(frozen=True, kw_only=True)
class LinkComparison(_Difference):
    """One message from one rank to another."""

    sender: int
    receiver: int
    num_messages: int  #: that were recorded


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """The share of the step in which a rank does not compute: its bubble."""

    rank: int
    planned_idle: float
    recorded_idle: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All of it; `recorded` is the step whose length is the median of all."""

    planned: Timeline
    recorded: Timeline
    number: int  #: of that step among the script's planned training steps
    step: _Difference
    ranks: tuple[RankComparison, ...]
    stages: tuple[StageComparison, ...]
    links: tuple[LinkComparison, ...]

    @property
    def planned_idle(self) -> float:
        """The bubble over all ranks."""
        return sum(rank.planned_idle for rank in self.ranks) / len(self.ranks)

    @property
    def recorded_idle(self) -> float:
        """The same, recorded."""
        return sum(rank.recorded_idle for rank in self.ranks) / len(self.ranks)


def compare(trace: Trace) -> Comparison:
    """Hold a trace's steps against its plan."""
    steps = sorted(trace.steps, key=lambda step: step.timeline.makespan_s)
    shown = steps[(len(steps) - 1) // 2]
    timelines = [step.timeline for step in steps]
    planned = planned_timeline(trace.plan, shown.num_microbatches)
    return Comparison(
        planned=planned,
        recorded=shown.timeline,
        number=shown.number,
        step=_Difference(
            planned_s=planned.makespan_s, recorded_s=median(timeline.makespan_s for timeline in timelines)
        ),
        ranks=tuple(
            RankComparison(
                rank=rank,
                planned_idle=idle_share(planned, rank),
                recorded_idle=median(idle_share(timeline, rank) for timeline in timelines),
            )
            for rank in range(trace.plan.num_ranks)
        ),
        stages=tuple(_stages(planned, timelines)),
        links=tuple(_links(planned if trace.plan.machine else None, timelines)),
    )


def planned_timeline(plan: PipelinePlan, num_microbatches: int | None = None) -> Timeline:
    """What the simulator says of a plan. Without its machine, messages are free; without its edges, stages a chain."""
    values = [(edge.producer, edge.consumers, edge.spec.requires_grad) for edge in plan.edges]
    messages = messages_between(values, plan.stage_ranks) if values else chain_messages(plan.stage_ranks)
    there: dict[tuple[int, int], int] = defaultdict(int)
    back: dict[tuple[int, int], int] = defaultdict(int)
    for edge in plan.edges:
        for reader in by_first_reader(edge.consumers, plan.stage_ranks):
            there[edge.producer, reader] += edge.spec.num_bytes
            back[edge.producer, reader] += edge.spec.num_bytes * edge.spec.requires_grad
    sizes = [MessageBytes(forward_bytes=there[m.route], gradient_bytes=back[m.route]) for m in messages]
    schedule = plan.schedule if num_microbatches is None else for_microbatches(plan.schedule, num_microbatches)
    return simulate(
        lower(schedule, messages), [stage.cost for stage in plan.stages], messages, sizes, plan.machine or _FREE
    )


def idle_share(timeline: Timeline, rank: int) -> float:
    """The share of the step in which a rank does not compute."""
    return 1 - timeline.busy_s(rank) / timeline.makespan_s if timeline.makespan_s else 0.0


def own_times(timeline: Timeline) -> Iterator[tuple[Interval, float]]:
    """Each transfer with the moment when its link was free for it: behind those that were sent before it."""
    free_s: dict[tuple[int, int | None], float] = {}
    for interval in sorted(timeline.intervals, key=lambda interval: interval.start_s):
        if not interval.action.kind.is_compute:
            link = interval.rank, interval.action.peer
            start_s = min(max(interval.start_s, free_s.get(link, 0.0)), interval.end_s)
            free_s[link] = max(interval.end_s, free_s.get(link, 0.0))
            yield interval, start_s


def _stages(planned: Timeline, recorded: Sequence[Timeline]) -> Iterator[StageComparison]:
    wanted, found = _compute_times([planned]), _compute_times(recorded)
    kinds = [ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT]
    for stage, kind, rank in sorted(found, key=lambda key: (key[0], kinds.index(key[1]))):
        times = wanted.get((stage, kind, rank))
        yield StageComparison(
            stage=stage,
            rank=rank,
            kind=kind,
            planned_s=median(times) if times else None,
            recorded_s=median(found[stage, kind, rank]),
        )


def _compute_times(timelines: Sequence[Timeline]) -> dict[tuple[int, ActionKind, int], list[float]]:
    times: dict[tuple[int, ActionKind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for interval in timeline.intervals:
            if interval.action.kind.is_compute:
                times[interval.action.stage, interval.action.kind, interval.rank].append(interval.duration_s)
    return times


def _links(planned: Timeline | None, recorded: Sequence[Timeline]) -> Iterator[LinkComparison]:
    wanted, found = _transfer_times([planned] if planned else []), _transfer_times(recorded)
    for sender, receiver in sorted(found):
        times = wanted.get((sender, receiver))
        yield LinkComparison(
            sender=sender,
            receiver=receiver,
            num_messages=len(found[sender, receiver]),
            planned_s=median(times) if times else None,
            recorded_s=median(found[sender, receiver]),
        )


def _transfer_times(timelines: Sequence[Timeline]) -> dict[tuple[int, int], list[float]]:
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for interval, start_s in own_times(timeline):
            assert interval.action.peer is not None
            times[interval.rank, interval.action.peer].append(interval.end_s - start_s)
    return times
