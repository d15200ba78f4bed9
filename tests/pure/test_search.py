"""The whole planner on small models."""

import pytest

from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.ir import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.planner import (
    SearchOptions,
    make_plan,
    message_bytes_of,
    messages_of,
    peak_memory,
    search,
    simulate,
    stage_costs,
)
from pfeife_accelerate.schedule import build, lower


def test_a_plan_is_whole(chain, costs, machine):
    graph = chain(8, skips=((0, 7),))
    plan = make_plan(graph, costs([1.0] * 8), machine(), 2, 4, SearchOptions(schedule="1f1b"))
    assert plan.graph_fingerprint == graph.fingerprint
    assert plan.cuts == (4,)
    assert [s.op_range for s in plan.stages] == [(0, 4), (4, 8)]
    assert plan.stages[1].params == tuple(f"layers.{i}.weight" for i in range(4, 8))
    assert plan.stage_ranks == (0, 1)
    assert [(edge.producer, edge.consumers, edge.value) for edge in plan.edges] == [(0, (1,), "n0"), (0, (1,), "n3")]
    assert plan.estimate_s == pytest.approx((4 + 1) * 4 * 3.0)


def test_the_estimate_is_the_simulation_of_the_plan(chain, costs, machine):
    graph, table, link = chain(12, skips=((1, 9),)), costs([1.0] * 12, saved_bytes=7), machine(bytes_per_s=40.0)
    plan = make_plan(graph, table, link, 2, 4)
    schedule = plan.schedule
    assert schedule == build(plan.spec)
    messages = messages_of(graph, plan.cuts, plan.stage_ranks)
    sizes = message_bytes_of(graph, plan.cuts, plan.stage_ranks)
    stages = stage_costs(graph, table, plan.cuts)
    assert simulate(schedule, stages, messages, sizes, link).makespan_s == plan.estimate_s
    assert peak_memory(schedule, stages).peak_bytes == plan.peak_bytes
    lower(schedule, messages)


def test_looping_is_chosen_where_it_shortens_the_ramp(chain, costs, machine):
    plan = make_plan(chain(16), costs([1.0] * 16, saved_bytes=1), machine(), 4, 8)
    assert (plan.spec.family, plan.spec.num_loops) == (ScheduleFamily.LOOPED, 2)


def test_looping_is_left_where_transfers_cost_more(chain, costs, machine):
    plan = make_plan(chain(16), costs([1.0] * 16), machine(latency_s=20.0), 4, 4)
    assert plan.spec.num_loops == 1


def test_of_equally_fast_orders_the_one_with_less_memory_wins(chain, costs, machine):
    plan = make_plan(chain(4), costs([1.0] * 4, saved_bytes=100), machine(), 1, 4)
    assert plan.spec.family is ScheduleFamily.ONE_F_ONE_B
    assert plan.peak_bytes == (4 * 4 * 4 + 400,)


def test_every_named_order_is_obeyed(chain, costs, machine):
    graph, table = chain(12), costs([1.0] * 12)
    for options, spec in (
        (SearchOptions(schedule="GPipe", num_loops=2), {"family": ScheduleFamily.GPIPE, "num_loops": 2}),
        (
            SearchOptions(schedule="1f1b", prefetch_forwards=1),
            {"family": ScheduleFamily.ONE_F_ONE_B, "prefetch_forwards": 1},
        ),
        (
            SearchOptions(schedule="looped", num_loops=3, microbatches_per_loop=2, prefetch_forwards=0),
            {"family": ScheduleFamily.LOOPED, "num_loops": 3, "microbatches_per_loop": 2},
        ),
        (
            SearchOptions(microbatches_per_loop=4, num_loops=2, prefetch_forwards=1),
            {"family": ScheduleFamily.LOOPED, "num_loops": 2, "microbatches_per_loop": 4, "prefetch_forwards": 1},
        ),
    ):
        plan = make_plan(graph, table, machine(), 2, 4, options)
        assert plan.spec == ScheduleSpec(num_ranks=2, num_microbatches=4, **spec)


def test_split_points_decide_the_cuts_and_the_loops(chain, costs, machine):
    graph, table = chain(10), costs([1.0] * 10)
    plan = make_plan(graph, table, machine(), 2, 4, SearchOptions(split_points=("layers.7",)))
    assert plan.cuts == (7,)
    plan = make_plan(graph, table, machine(), 2, 4, SearchOptions(split_points=("layers.1", "layers.2", "n8")))
    assert (plan.cuts, plan.spec.num_loops) == ((1, 2, 8), 2)
    with pytest.raises(PfeifeError, match="PF303 2 split points for 2 stages"):
        make_plan(graph, table, machine(), 2, 4, SearchOptions(split_points=("layers.1", "layers.2")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SearchOptions(schedule="lopped"), "PF212"),
        (SearchOptions(schedule="gpipe", prefetch_forwards=1), "PF210(.|\n)*nothing to prefetch"),
        (SearchOptions(schedule="1f1b", num_loops=2), "PF210(.|\n)*one stage on each rank"),
        (SearchOptions(microbatches_per_loop=9), "PF210(.|\n)*at most all of them"),
        (SearchOptions(num_loops=9), "PF301 the model cannot be cut into 18 stages"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(chain, costs, machine, options, message):
    with pytest.raises(PfeifeError, match=message):
        make_plan(chain(8), costs([1.0] * 8), machine(), 2, 4, options)


def test_more_ranks_than_operations(chain, costs, machine):
    with pytest.raises(PfeifeError, match="PF301 the model cannot be cut into 4 stages"):
        make_plan(chain(3), costs([1.0] * 3), machine(), 4, 4)


def test_an_order_that_deadlocks_is_drawn_not_planned(chain, costs, machine):
    options = SearchOptions(schedule="looped", num_loops=3, microbatches_per_loop=4, prefetch_forwards=3)
    with pytest.raises(PfeifeError, match=r"PF204 schedule deadlocks(.|\n)*<- here"):
        make_plan(chain(12), costs([1.0] * 12), machine(), 4, 5, options)


def test_orders_refused_that_can_run_are_a_fault_of_the_package(chain, costs, machine, monkeypatch):
    monkeypatch.setattr(search, "is_executable", lambda *_: False)
    with pytest.raises(InternalError, match=r"PF311 an order was refused that can run(.|\n)*where(.|\n)*num_ranks=2"):
        make_plan(chain(8), costs([1.0] * 8), machine(), 2, 4)


def test_memory_forbids_what_would_be_faster(chain, costs, machine):
    graph, table = chain(8), costs([1.0] * 8, saved_bytes=100)
    free = make_plan(graph, table, machine(latency_s=5.0), 2, 8)
    # 1F1B without prefetch holds two micro-batches on rank 0: 2 * 4 * 100 bytes and 4 parameters with their state.
    tight = make_plan(graph, table, machine(latency_s=5.0, memory_bytes=1000), 2, 8)
    assert max(free.peak_bytes) > 900 >= max(tight.peak_bytes)
    assert tight.estimate_s > free.estimate_s


def test_cuts_by_memory_are_the_way_out(chain, costs, machine):
    # The first two operations take nearly all the time; equal time would leave the other six to one rank.
    table = costs([10.0, 10.0, *[0.1] * 6], saved_bytes=0)
    roomy = make_plan(chain(8), table, machine(), 2, 1, SearchOptions(num_loops=1))
    assert roomy.cuts == (1,)
    tight = make_plan(chain(8), table, machine(memory_bytes=80), 2, 1, SearchOptions(num_loops=1))
    assert tight.cuts == (4,)


def test_a_plan_that_does_not_fit_says_by_how_much(chain, costs, machine):
    with pytest.raises(PfeifeError) as error:
        make_plan(chain(8), costs([1.0] * 8, saved_bytes=100), machine(memory_bytes=100), 2, 8)
    lines = str(error.value).splitlines()
    assert lines[0] == "PF302 no plan fits into memory; the nearest one exceeds it on 2 of 2 ranks"
    assert lines[1].startswith("  rank 0 needs 864 bytes (64 of them parameters, gradients, optimizer state)")
    assert lines[1].endswith("may use 90: 774 too many")
    assert any("at least" in line and "processes" in line for line in lines)
