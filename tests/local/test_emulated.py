"""Emulated devices under the real executor: what was recorded is what the simulator says."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from emulated_cases import FAMILIES, EmulatedStep, a_step

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import ActionKind, ScheduleFamily, Timeline
from pfeife_accelerate.runtime.emulated import Speeds
from pfeife_accelerate.runtime.emulated_run import run_emulated

pytestmark = pytest.mark.local

MOST_APART = 0.03  # on idle cores: what `-m slow` and docs/benchmarks/emulated.md hold it to
MOST_APART_BUSY = 0.12


def recorded(step: EmulatedStep, most_apart: float) -> Timeline:
    """One emulated step; of some, where the machine was busy with something else during the first ones."""
    simulated_s = step.simulated().makespan_s
    timelines = []
    for _ in range(4):
        timelines.append(run_emulated(step.lowered, step.messages, step.speeds()))
        if abs(timelines[-1].makespan_s / simulated_s - 1) < most_apart:
            break
    return min(timelines, key=lambda timeline: timeline.makespan_s)


def check(family: ScheduleFamily, num_ranks: int, num_microbatches: int, most_apart: float) -> None:
    step = a_step(family, num_ranks, num_microbatches, forward_s=0.02)
    simulated, timeline = step.simulated(), recorded(step, most_apart)
    assert abs(timeline.makespan_s / simulated.makespan_s - 1) < most_apart, (
        f"recorded {timeline.makespan_s:.4f} s, simulated {simulated.makespan_s:.4f} s"
    )
    wanted = sorted(str(i.action) for i in simulated.intervals)
    assert sorted(str(i.action) for i in timeline.intervals) == wanted, "each action once"
    for rank, actions in enumerate(step.schedule.per_rank):
        own = [i for i in timeline.intervals if i.rank == rank and i.action.kind.is_compute]
        assert tuple(i.action for i in own) == actions, "in the order of the list"
        assert all(a.end_s <= b.start_s for a, b in pairwise(own)), "one at a time"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.value)
def test_four_emulated_ranks_take_as_long_as_simulated(family: ScheduleFamily):
    check(family, 4, 4, MOST_APART_BUSY)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.value)
def test_many_emulated_ranks_take_as_long_as_simulated(family: ScheduleFamily, num_ranks: int):
    check(family, num_ranks, 2 * num_ranks, MOST_APART)


def test_what_takes_longer_than_planned_shows():
    step = a_step(ScheduleFamily.ONE_F_ONE_B, 4, 4, forward_s=0.005)
    speeds = step.speeds()
    slower = {key: seconds * (3 if key[1] == 2 else 1) for key, seconds in speeds.compute_s.items()}
    timeline = run_emulated(step.lowered, step.messages, Speeds(compute_s=slower, transfer_s=speeds.transfer_s))
    assert timeline.makespan_s > 1.5 * step.simulated().makespan_s


def test_a_slow_link_delays_what_is_behind_it():
    step = a_step(ScheduleFamily.GPIPE, 4, 2, forward_s=0.002)
    speeds = step.speeds()
    slow = {key: 0.05 if key[0] else seconds for key, seconds in speeds.transfer_s.items()}
    timeline = run_emulated(step.lowered, step.messages, Speeds(compute_s=speeds.compute_s, transfer_s=slow))
    sends = [i for i in timeline.intervals if i.action.kind is ActionKind.SEND_B and i.rank == 1 and i.action.peer == 0]
    assert len(sends) == 2
    assert sends[1].end_s - sends[0].end_s > 0.045, "one transfer at a time"


def test_an_error_on_one_rank_ends_all():
    step = a_step(ScheduleFamily.GPIPE, 4, 2, forward_s=0.001)
    speeds = step.speeds()
    missing = {key: seconds for key, seconds in speeds.transfer_s.items() if key[1] != 2}
    with pytest.raises((KeyError, PfeifeError)):
        run_emulated(step.lowered, step.messages, Speeds(compute_s=speeds.compute_s, transfer_s=missing))
