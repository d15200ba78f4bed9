"""Steps to be emulated: orders of every family on stages of unequal cost, with a value that passes over a stage.

Models: what a plan says (costs, messages, their sizes, the machine), as the simulator takes it and as the emulation
takes it. Ignores: models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pfeife_accelerate.ir import (
    ActionKind,
    DeviceSpec,
    LinkSpec,
    Machine,
    Schedule,
    ScheduleFamily,
    ScheduleSpec,
    StageCost,
    Timeline,
)
from pfeife_accelerate.planner import MessageBytes, simulate
from pfeife_accelerate.runtime.emulated import Speeds
from pfeife_accelerate.schedule import Messages, build, lower, messages_between
from pfeife_accelerate.schedule.listing import JobGraph, list_schedule
from pfeife_accelerate.schedule.order import Order, schedule_of

__all__ = ["FAMILIES", "EmulatedStep", "a_step", "speeds_of"]

FAMILIES = tuple(ScheduleFamily)
#: Two hosts' worth of a slow network: a message takes 2 ms and another ms for each megabyte.
_MACHINE = Machine(
    devices=(DeviceSpec(name="emulated", memory_bytes=2**40, flops_per_s=(), bytes_per_s=1e12, launch_s=0.0),),
    link=LinkSpec(latency_s=2e-3, bytes_per_s=1e9),
)
_MEGABYTE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class EmulatedStep:
    """One step as the simulator takes it."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    messages: Messages
    sizes: tuple[MessageBytes, ...]
    machine: Machine

    @property
    def lowered(self) -> Schedule:
        """The lists that ranks execute."""
        return lower(self.schedule, self.messages)

    def simulated(self) -> Timeline:
        """What the simulator says."""
        return simulate(self.lowered, self.costs, self.messages, self.sizes, self.machine)

    def speeds(self) -> Speeds:
        """What devices and links take."""
        return speeds_of(self.schedule.stage_ranks, self.costs, self.messages, self.sizes, self.machine)


def speeds_of(
    stage_ranks: Sequence[int],
    costs: Sequence[StageCost],
    messages: Messages,
    sizes: Sequence[MessageBytes],
    machine: Machine,
) -> Speeds:
    """A plan's costs as times of emulated devices and links."""
    compute_s: dict[tuple[ActionKind, int], float] = {}
    for stage, cost in enumerate(costs):
        compute_s[ActionKind.FORWARD, stage] = cost.forward_s
        compute_s[ActionKind.BACKWARD, stage] = cost.backward_s
        compute_s[ActionKind.INPUT_GRADIENT, stage] = cost.backward_s - cost.backward_weight_s
        compute_s[ActionKind.WEIGHT_GRADIENT, stage] = cost.backward_weight_s
    transfer_s: dict[tuple[bool, int, int], float] = {}
    for message, size in zip(messages, sizes, strict=True):
        producer, reader = message.route
        source, target = stage_ranks[producer], message.consumer_rank
        transfer_s[False, producer, reader] = machine.link_of(source, target).transfer_s(size.forward_bytes)
        transfer_s[True, producer, reader] = machine.link_of(target, source).transfer_s(size.gradient_bytes)
    return Speeds(compute_s=compute_s, transfer_s=transfer_s)


def a_step(family: ScheduleFamily, num_ranks: int, num_microbatches: int, *, forward_s: float) -> EmulatedStep:
    """A step of a family; forwards take `forward_s` on average, backwards twice as long."""
    loops = {ScheduleFamily.GPIPE: 1, ScheduleFamily.ONE_F_ONE_B: 1, ScheduleFamily.ZB_H1: 1}.get(family, 2)
    is_looped = family is ScheduleFamily.LOOPED
    spec = ScheduleSpec(
        family=family,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_loops=loops,
        microbatches_per_loop=num_ranks if is_looped else None,
        prefetch_forwards=num_ranks - 1 if is_looped else 0,
    )
    chance = random.Random(f"{family.value} {num_ranks}")
    stage_ranks = spec.stage_ranks
    if family is ScheduleFamily.LIST:  # a placement that no other family has
        stage_ranks = (*range(num_ranks), *chance.sample(range(num_ranks), num_ranks))
    last = spec.num_stages - 1
    chain = [(stage, (stage + 1,), True) for stage in range(last)]
    messages = messages_between([*chain, (0, (last // 2,), True), (0, (last,), False)], stage_ranks)
    costs = tuple(_cost(forward_s * chance.uniform(0.7, 1.3)) for _ in stage_ranks)
    sizes = tuple(
        MessageBytes(
            forward_bytes=(size := chance.randrange(_MEGABYTE, 4 * _MEGABYTE)), gradient_bytes=size * message.has_grad
        )
        for message in messages
    )
    if family is ScheduleFamily.LIST:
        schedule = _listed(spec, stage_ranks, costs, messages)
    else:
        schedule = build(spec)
    return EmulatedStep(schedule=schedule, costs=costs, messages=messages, sizes=sizes, machine=_MACHINE)


def _cost(forward_s: float) -> StageCost:
    return StageCost(forward_s=forward_s, backward_s=2 * forward_s, backward_weight_s=forward_s)


def _listed(spec: ScheduleSpec, stage_ranks: Sequence[int], costs: Sequence[StageCost], messages: Messages) -> Schedule:
    """Each rank takes what is ready and farthest from the end."""
    number = spec.num_microbatches
    graph = JobGraph(stage_ranks, messages, number)
    seconds = [cost.forward_s for cost in costs for _ in range(number)]
    seconds += [cost.backward_s for cost in costs for _ in range(number)]
    seconds += [_MACHINE.link.latency_s] * (graph.num_nodes - graph.num_jobs)
    back = list_schedule(graph, seconds, [0.0] * graph.num_nodes, reverse=True)
    urgency = [back.end_s - start - lasts for start, lasts in zip(back.start_s, seconds, strict=True)]
    listing = list_schedule(graph, seconds, urgency)
    like = Order(jobs=(), stage_ranks=tuple(stage_ranks), num_microbatches=number, is_split=False)
    return schedule_of(listing.order(like), spec)
