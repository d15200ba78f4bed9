"""Why the other families lost, in one line each."""

from __future__ import annotations

import re

import pytest

from pfeife_accelerate.ir import ScheduleFamily
from pfeife_accelerate.planner import SearchOptions, make_plan
from tests.cost_graphs import chain, machine, node

FAMILIES = {family.value for family in ScheduleFamily} | {"1f1b with prefetch"}


def losers(graph, where, ranks=4, microbatches=8, **options):
    planned = make_plan(graph, where, ranks, microbatches, SearchOptions(**options))
    return planned, {other.family: other for other in planned.runners_up}


@pytest.mark.parametrize("backward", ["whole", "split"])
def test_every_other_family_has_one_line_and_the_fastest_comes_first(backward):
    planned, others = losers(chain(16, num_bytes=1), machine(bytes_per_s=5.0), backward=backward)
    families = {"gpipe", "1f1b", "1f1b with prefetch", "looped", "wave"}
    families |= {"zb-h1", "zb-v"} if backward == "split" else set()
    winner = planned.schedule.spec.family.value
    assert set(others) >= families - {winner, "1f1b with prefetch"}
    assert set(others) <= FAMILIES - ({winner} if winner != "1f1b" else set())
    assert len(others) == len(planned.runners_up)
    times = [other.estimate_s for other in planned.runners_up]
    assert times == sorted(times)
    for other in planned.runners_up:
        assert "\n" not in other.why
        if other.estimate_s > planned.estimate_s * (1 + 1e-9):
            found = re.fullmatch(r"(\d+\.\d\d) ms more with (\d+) stages? a rank: .+", other.why)
            lost_ms = (other.estimate_s - planned.estimate_s) * 1e3
            assert float(found[1]) == pytest.approx(lost_ms, abs=0.006)
        else:
            assert re.fullmatch(r"as fast, with \d+ stages? a rank", other.why)


def test_the_reason_is_what_differs():
    """gpipe and 1F1B on one stage a rank wait while the pipeline fills and empties."""
    _, others = losers(chain(32), machine())
    assert (
        others["gpipe"].why.endswith("ranks wait longer at the start and the end") or "as fast" in others["gpipe"].why
    )
    assert others["1f1b"].why.endswith("ranks wait longer at the start and the end")


def test_what_does_not_fit_says_by_how_much_on_which_rank():
    """gpipe keeps all eight micro-batches: 8 GiB on each rank of two, and 4.5 may be used."""
    gib = 2**30
    graph = chain([node(saved=gib // 4)] * 8)
    planned, others = losers(graph, machine(memory_bytes=5 * gib), ranks=2)
    assert max(planned.peak_bytes) <= 4.5 * gib
    assert others["gpipe"].estimate_s is None
    found = re.fullmatch(r"does not fit: (\d+\.\d\d) GiB too many on rank \d", others["gpipe"].why)
    assert float(found[1]) == pytest.approx(3.5)
    assert planned.runners_up[-1].estimate_s is None


def test_one_family_by_name_has_no_others():
    planned, others = losers(chain(16), machine(), schedule="gpipe")
    assert (planned.schedule.spec.family, others) == (ScheduleFamily.GPIPE, {})
