"""The simulator that judges plans, on cases whose result is known from the literature or by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pfeife_accelerate.ir import (
    CostGraph,
    CostNode,
    CostValue,
    DeviceSpec,
    LinkSpec,
    Machine,
    ParamUse,
    ScheduleFamily,
    ScheduleSpec,
)
from pfeife_accelerate.schedule import build

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from event_simulator import simulate
from pipeline_orders import Parameters, gpipe, looped, round_robin, split_backward

FAST = float("inf")


def a_machine(latency_s=0.0, bytes_per_s=FAST):
    device = DeviceSpec(name="test", memory_bytes=10**12, flops_per_s=(), bytes_per_s=0.0, launch_s=0.0)
    return Machine(devices=(device,), link=LinkSpec(latency_s=latency_s, bytes_per_s=bytes_per_s))


def a_chain(num_ops, *, forward_s=1.0, halves_s=(1.0, 1.0), num_bytes=1, saved_bytes=1, values=(), params=()):
    """Operations that hand `num_bytes` on; more `values`; `params` of operation i at position i."""
    nodes = tuple(
        CostNode(
            op="op",
            forward_s=forward_s,
            backward_input_s=halves_s[0],
            backward_weight_s=halves_s[1],
            saved_bytes=saved_bytes,
            params=params[index] if index < len(params) else (),
        )
        for index in range(num_ops)
    )
    chain = tuple(
        CostValue(producer=index, readers=(index + 1,), num_bytes=num_bytes, gradient_bytes=num_bytes)
        for index in range(num_ops - 1)
    )
    return CostGraph(name="chain", nodes=nodes, values=(*chain, *values))


def a_value(producer, *readers, num_bytes=10, gradient_bytes=None):
    gradient_bytes = num_bytes if gradient_bytes is None else gradient_bytes
    return CostValue(producer=producer, readers=readers, num_bytes=num_bytes, gradient_bytes=gradient_bytes)


def each_alone(graph, machine, per_rank, stage_ranks=None):
    """Every operation a stage."""
    stages = len(graph.nodes)
    stage_ranks = stage_ranks or tuple(stage % len(per_rank) for stage in range(stages))
    return simulate(graph, machine, range(1, stages), stage_ranks, per_rank)


def lists(*rows):
    return tuple(tuple(row.split()) for row in rows)


# -- bubbles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_gpipe_and_1f1b_have_the_bubble_of_the_textbooks(ranks, rounds):
    microbatches = ranks * rounds
    one_f_one_b = looped(ranks, microbatches, Parameters(loops=1, per_loop=microbatches, prefetch=0))
    for orders in (gpipe(ranks, microbatches), one_f_one_b):
        outcome = each_alone(a_chain(ranks), a_machine(), orders)
        assert outcome.makespan_s == pytest.approx((microbatches + ranks - 1) * 3.0)
        bubble = 1 - sum(outcome.busy_s) / ranks / outcome.makespan_s
        assert bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("loops", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_number_of_loops(ranks, loops):
    microbatches = 2 * ranks
    orders = looped(ranks, microbatches, Parameters(loops=loops, per_loop=ranks, prefetch=ranks - 1))
    graph = a_chain(ranks * loops, forward_s=1 / loops, halves_s=(1 / loops, 1 / loops))
    outcome = each_alone(graph, a_machine(), orders)
    assert outcome.makespan_s == pytest.approx(3 * microbatches + 3 * (ranks - 1) / loops)


def test_1f1b_keeps_fewer_micro_batches_on_later_ranks():
    outcome = each_alone(a_chain(4), a_machine(), looped(4, 8, Parameters(loops=1, per_loop=8, prefetch=0)))
    assert outcome.peak_bytes == (4, 3, 2, 1)
    assert each_alone(a_chain(4), a_machine(), gpipe(4, 8)).peak_bytes == (8, 8, 8, 8)


def test_weight_gradients_fill_the_bubble():
    """ZB-H1 by hand: the bubble of 1F1B, (p-1)(F+I+W), shrinks to (p-1)(F+I-W); here F = I = W."""
    orders = lists(
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2",
    )
    graph, machine = a_chain(3), a_machine()
    whole = looped(3, 3, Parameters(loops=1, per_loop=3, prefetch=0))
    assert each_alone(graph, machine, whole).makespan_s == 15
    assert each_alone(graph, machine, split_backward(whole)).makespan_s == 13
    assert each_alone(graph, machine, orders).makespan_s == 11


def test_what_is_saved_is_freed_after_the_weight_gradient():
    late = lists("0F0 0I0 0F1 0I1 0W0 0W1")
    early = lists("0F0 0I0 0W0 0F1 0I1 0W1")
    assert simulate(a_chain(1), a_machine(), (), (0,), late).peak_bytes == (2,)
    assert simulate(a_chain(1), a_machine(), (), (0,), early).peak_bytes == (1,)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_link_carries_one_message_at_a_time():
    """Transfers of 2 s. Rank 1 has micro-batch 0 at 3 and 1 at 5; gradients leave at 8 and 10."""
    machine, graph = a_machine(latency_s=1.0, bytes_per_s=1.0), a_chain(2)
    assert each_alone(graph, machine, lists("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")).makespan_s == 14
    assert each_alone(graph, machine, lists("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")).makespan_s == 13


def test_the_directions_of_a_link_do_not_share():
    """Rank 1 sends a forward while rank 0 sends another: with one link for both the second would be 2 s later."""
    graph = a_chain(4, halves_s=(0.0, 0.0))
    outcome = each_alone(
        graph, a_machine(latency_s=2.0), lists("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")
    )
    # 1F0 3-4, its message 4-6 while micro-batch 1 goes the other way 3-5. 2F0 6-7, 3F0 9-10, 3F1 11-12; then two
    # gradients to rank 0, 12-14 and 14-16, to rank 1, 14-16 and 16-18, to rank 0, 16-18 and 18-20.
    assert outcome.makespan_s == 20
    assert outcome.link_busy_s == {(0, 1): 12.0, (1, 0): 12.0}


def test_a_skip_goes_straight_to_its_reader():
    """0F 0-1, the skip arrives at 6, 2F 6-7, 2B 7-9, the skip's gradient 9-14, 0B 14-16."""
    graph = a_chain(3, values=(a_value(0, 2, num_bytes=5),), num_bytes=0)
    one = lists("0F0 0B0", "1F0 1B0", "2F0 2B0")
    assert each_alone(graph, a_machine(bytes_per_s=1.0), one).makespan_s == 16


def test_a_tensor_goes_once_to_a_rank_with_all_that_its_first_reader_needs():
    graph = a_chain(4, num_bytes=3, values=(a_value(0, 1, 3), a_value(0, 3, num_bytes=7)))
    outcome = each_alone(graph, a_machine(latency_s=1.0, bytes_per_s=1.0), gpipe(2, 1, 2))
    # To rank 1: 3 + 10 from stage 0, first read by stage 1; 7 for stage 3; 3 from stage 2; a gradient of 3.
    assert outcome.link_busy_s[0, 1] == 14 + 8 + 4 + 4
    assert outcome.link_busy_s[1, 0] == 14 + 8 + 4 + 4


def test_what_has_no_gradient_sends_none_back():
    graph = a_chain(2, num_bytes=0, values=(a_value(0, 1, gradient_bytes=0),))
    outcome = each_alone(graph, a_machine(latency_s=1.0), gpipe(2, 1))
    assert outcome.link_busy_s == {(0, 1): 1.0}
    assert outcome.end_s == (3.0, 5.0)


def test_stages_of_one_rank_need_no_message():
    outcome = each_alone(a_chain(3), a_machine(latency_s=1.0), lists("0F0 1F0 2F0 2B0 1B0 0B0"), (0, 0, 0))
    assert (outcome.makespan_s, outcome.link_busy_s) == (9.0, {})


def test_links_between_hosts_take_their_own_time():
    machine = Machine(
        devices=a_machine().devices,
        link=LinkSpec(latency_s=1.0, bytes_per_s=FAST),
        ranks_per_host=2,
        link_between_hosts=LinkSpec(latency_s=10.0, bytes_per_s=FAST),
    )
    assert each_alone(a_chain(3), machine, gpipe(3, 1)).makespan_s == 9 + 2 * 1 + 2 * 10


# -- ends and refusals -------------------------------------------------------------------------------------------------


def test_each_rank_ends_with_its_own_part_of_the_optimizer_step():
    params = [
        (ParamUse(owner=index, num_bytes=2, state_bytes=16, optimizer_s=seconds),)
        for index, seconds in ((0, 1.0), (1, 9.0))
    ]
    outcome = each_alone(a_chain(2, params=params), a_machine(), gpipe(2, 1))
    assert outcome.end_s == (7.0, 13.0)
    assert outcome.peak_bytes == (17, 17)


def test_a_tied_parameter_counts_once_a_rank():
    use = (ParamUse(owner=0, num_bytes=2, state_bytes=16, optimizer_s=1.0),)
    graph = a_chain(3, params=(use, (), use), saved_bytes=0)
    assert each_alone(graph, a_machine(), gpipe(3, 1)).peak_bytes == (16, 0, 16)
    assert each_alone(graph, a_machine(), lists("0F0 2F0 2B0 0B0", "1F0 1B0"), (0, 1, 0)).peak_bytes == (16, 0)


def test_a_deadlock_is_none():
    assert each_alone(a_chain(2), a_machine(), lists("0F0 0B0", "1B0 1F0")) is None
    assert simulate(a_chain(1), a_machine(), (), (0,), lists("0F0 0W0 0I0")) is None
    # The known one of the looped order: 4 ranks, 5 micro-batches, 3 loops, blocks of 4, all prefetched.
    orders = looped(4, 5, Parameters(loops=3, per_loop=4, prefetch=3))
    assert each_alone(a_chain(12), a_machine(), orders) is None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (("0F0 0B0", "1F0"), "stage 1 runs F with micro-batch 0"),
        (("0F0 0B0", "1F0 1B0 1F2 1B2"), "stage 0 runs nothing with micro-batch 1"),
        (("0F0 0B0 1F0", "1B0"), "rank 0 runs stage 1"),
        (("0F0 0B0 0W0", "1F0 1B0"), "stage 0 runs BFW"),
        (("0F0 0B0 0SEND_F0@1", "1F0 1B0"), "not an action"),
    ],
)
def test_a_list_that_is_no_step_is_refused(rows, text):
    with pytest.raises(ValueError, match=text):
        each_alone(a_chain(2), a_machine(), lists(*rows))


def test_cuts_that_leave_a_stage_empty_are_refused():
    with pytest.raises(ValueError, match="do not make 3 stages"):
        simulate(a_chain(4), a_machine(), (2, 2), (0, 1, 2), gpipe(3, 1))


# -- orders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("loops", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [4, 5])
def test_the_orders_are_those_that_the_package_runs(ranks, loops, microbatches):
    for per_loop in range(1, microbatches + 1):
        for prefetch in range(ranks):
            spec = ScheduleSpec(
                family=ScheduleFamily.LOOPED,
                num_ranks=ranks,
                num_microbatches=microbatches,
                num_loops=loops,
                microbatches_per_loop=per_loop,
                prefetch_forwards=prefetch,
            )
            schedule = build(spec)
            assert schedule.stage_ranks == round_robin(ranks, loops)
            parameters = Parameters(loops=loops, per_loop=per_loop, prefetch=prefetch)
            assert looped(ranks, microbatches, parameters) == tuple(tuple(map(str, row)) for row in schedule.per_rank)
    spec = ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=ranks, num_microbatches=microbatches, num_loops=loops)
    assert gpipe(ranks, microbatches, loops) == tuple(tuple(map(str, row)) for row in build(spec).per_rank)
