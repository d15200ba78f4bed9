"""Orders that follow from a given one: for another number of micro-batches, or with those of each stage in sequence.

Models: any order on any placement. Ignores: whether another order would be faster for that number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.schedule.families import build, build_for

__all__ = ["for_microbatches", "in_sequence"]


def for_microbatches(schedule: Schedule, number: int) -> Schedule:
    """The compute-only `schedule` with `number` micro-batches; where the given one can run, so can this one.

    An action depends on actions of its own micro-batch alone, and on those in front of it in its rank's list.

    Fewer: the actions of the missing micro-batches are dropped. What is left keeps its dependencies, and two actions
    that follow each other in a list now did so, at a distance, before: whatever waits in a ring now did before.

    More: the generated order where the given one was generated, else the given order in blocks, one behind the other
    on every rank, the last one cut short. All of one block can run, then all of the next one, which depends on nothing
    in the first; that respects every list, so the lists cannot deadlock. No rank waits for the others between blocks.
    """
    given = schedule.num_microbatches
    if number == given:
        return schedule
    if number < given:
        spec = _with_number(schedule.spec, number)
        return replace(schedule, spec=spec, per_rank=tuple(_fewer(actions, number) for actions in schedule.per_rank))
    if schedule.spec.family is not ScheduleFamily.LIST and schedule == build(schedule.spec):
        return build_for(schedule.spec, number)
    return replace(
        schedule,
        spec=_with_number(schedule.spec, number),
        per_rank=tuple(_more(actions, given, number) for actions in schedule.per_rank),
    )


def in_sequence(schedule: Schedule) -> Schedule:
    """The compute-only `schedule` with the micro-batches of each stage in increasing order, forwards and backwards.

    The k-th forward of a stage becomes that of micro-batch k, and so on for each kind: ranks do the same work at the
    same time, but for micro-batches of another size. If the given lists can run, so can these: before the k-th action
    of a kind, a run of the given lists has done at least k of each action that one depends on, so that here, where they
    come in sequence, the k-th of them is among those done.
    """
    return replace(schedule, per_rank=tuple(_in_sequence(actions) for actions in schedule.per_rank))


def _in_sequence(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    done: Counter[tuple[ActionKind, int]] = Counter()
    renumbered = []
    for action in actions:
        renumbered.append(replace(action, microbatch=done[action.kind, action.stage]))
        done[action.kind, action.stage] += 1
    return tuple(renumbered)


def _with_number(spec: ScheduleSpec, number: int) -> ScheduleSpec:
    if number < 1:
        raise PfeifeError(
            id="PF210",
            what=f"impossible schedule: num_microbatches={number}",
            why="num_microbatches is at least 1",
            hints=("num_microbatches=1",),
        )
    per_loop = spec.microbatches_per_loop
    return replace(spec, num_microbatches=number, microbatches_per_loop=per_loop and min(per_loop, number))


def _fewer(actions: tuple[Action, ...], number: int) -> tuple[Action, ...]:
    return tuple(action for action in actions if action.microbatch < number)


def _more(actions: tuple[Action, ...], given: int, number: int) -> tuple[Action, ...]:
    return tuple(
        replace(action, microbatch=action.microbatch + first)
        for first in range(0, number, given)
        for action in actions
        if action.microbatch + first < number
    )
