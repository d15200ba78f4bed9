"""Activations alive in the actual order, and what a rank's peak consists of.

Peaks on random graphs and orders are compared with the other simulator's in `test_event_graph`.
"""

from __future__ import annotations

import numpy as np
import pytest

from pfeife_accelerate.ir import CostGraph, CostValue, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.planner import Problem, SearchOptions
from pfeife_accelerate.planner.memory import MemoryProfile
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.schedule.families import numbered
from pfeife_accelerate.schedule.order import Order
from tests.cost_graphs import chain, machine, node, random_cost_graph, use


def order_by(family, ranks, microbatches, **numbers):
    return numbered(
        ScheduleSpec(family=ScheduleFamily(family), num_ranks=ranks, num_microbatches=microbatches, **numbers)
    )


def items_of(graph, order, cuts, *, recompute=(), memory_bytes=1000):
    problem = Problem(
        graph=graph,
        machine=machine(memory_bytes=memory_bytes),
        num_ranks=order.num_ranks,
        num_microbatches=order.num_microbatches,
        options=SearchOptions(backward="split" if order.is_split else "whole"),
    )
    rows = np.asarray([cuts], dtype=np.int64).reshape(1, -1)
    slices = Slices(problem, rows, order.stage_ranks, recompute)
    profile = MemoryProfile(order)
    items = profile.items(slices)
    assert [item.peak_bytes for item in items] == profile.peaks(slices)[:, 0].tolist()
    return items


def peaks_of(graph, order, cuts, **options):
    """Without messages under way."""
    return [item.peak_bytes - item.buffer_bytes for item in items_of(graph, order, cuts, **options)]


def kept(number, saved=10, **numbers):
    return chain([node(saved=saved, **numbers) for _ in range(number)])


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 2)])
def test_1f1b_holds_as_many_micro_batches_as_ranks_follow(ranks, microbatches):
    found = peaks_of(kept(ranks), order_by("1f1b", ranks, microbatches), range(1, ranks))
    assert found == [10 * min(ranks - rank, microbatches) for rank in range(ranks)]


def test_prefetch_holds_more():
    assert peaks_of(kept(4), order_by("1f1b", 4, 8, prefetch_forwards=1), (1, 2, 3)) == [50, 40, 30, 10]


def test_gpipe_holds_all():
    assert peaks_of(kept(4), order_by("gpipe", 2, 5, num_loops=2), (1, 2, 3)) == [100, 100]


def test_what_the_peak_consists_of():
    """Two ranks with two stages each; the second has the most workspace, and one parameter more."""
    nodes = [node(saved=10, workspace=3, params=(use(index, 100),)) for index in range(3)]
    nodes.append(node(saved=10, workspace=7, params=(use(3, 100), use(4, 8, state_bytes=20))))
    first, second = items_of(chain(nodes), order_by("looped", 2, 2, num_loops=2), (1, 2, 3), memory_bytes=2000)
    assert (first.params_bytes, first.state_bytes) == (200, 600)
    assert (first.activation_bytes, first.workspace_bytes) == (40, 3)
    assert (second.params_bytes, second.state_bytes) == (208, 20 - 8 + 600)
    assert (second.activation_bytes, second.workspace_bytes) == (30, 7)
    assert (first.limit_bytes, first.excess_bytes) == (1800, 843 + first.buffer_bytes - 1800)


def test_the_workspace_of_an_early_operation_may_be_free_again():
    """10 kept and 100 temporary in the first operation exceed the 30 kept at the end by 80."""
    graph = chain([node(saved=10, workspace=100), node(saved=20, workspace=5), node(saved=40)])
    first, second = items_of(graph, order_by("gpipe", 2, 1), (2,))
    assert (first.activation_bytes, first.workspace_bytes) == (30, 80)
    assert (second.activation_bytes, second.workspace_bytes) == (40, 0)


def test_a_weight_gradient_put_off_keeps_its_activations():
    late = Order(jobs=(np.asarray([0, 2, 1, 3, 4, 5]),), stage_ranks=(0,), num_microbatches=2, is_split=True)
    early = Order(jobs=(np.asarray([0, 2, 4, 1, 3, 5]),), stage_ranks=(0,), num_microbatches=2, is_split=True)
    assert peaks_of(kept(1), late, ()) == [20]
    assert peaks_of(kept(1), early, ()) == [10]


def test_a_tied_parameter_counts_once_on_each_rank_that_reads_it():
    """Read by operations 0, 1 and 3: twice on the first rank, once on the second."""
    nodes = [node(params=(use(0, 100),)) for _ in range(4)]
    nodes[2] = node(params=(use(2, 50),))
    assert peaks_of(chain(nodes), order_by("1f1b", 2, 2), (2,)) == [400, 600]
    assert peaks_of(chain(nodes), order_by("looped", 1, 2, num_loops=2), (2,)) == [600]
    assert peaks_of(chain(nodes), order_by("wave", 2, 2, num_loops=2), (1, 2, 3)) == [400, 600]


def test_a_parameter_read_twice_by_one_operation_counts_once():
    assert peaks_of(chain([node(params=(use(0, 10), use(0, 10)))]), order_by("gpipe", 1, 1), ()) == [40]


# -- recomputation -----------------------------------------------------------------------------------------------------


def sliced(graph, cuts, recompute, *, backward="whole"):
    problem = Problem(
        graph=graph, machine=machine(), num_ranks=2, num_microbatches=2, options=SearchOptions(backward=backward)
    )
    return Slices(problem, np.asarray([cuts]), (0, 1), recompute)


def test_a_stage_that_recomputes_keeps_its_inputs_and_runs_its_forward_again():
    graph = chain([node(saved=10), node(saved=20), node(2.0, saved=30), node(saved=40)], num_bytes=3, skips=[(0, 3)])
    plain, again = sliced(graph, (2,), ()), sliced(graph, (2,), (1,))
    assert plain.saved_bytes[:, 0].tolist() == [30, 70]
    assert again.saved_bytes[:, 0].tolist() == [30, 3 + 3]
    assert plain.backward_s[0][:, 0].tolist() == [4, 6]
    assert again.backward_s[0][:, 0].tolist() == [4, 6 + 3]
    assert again.forward_s[:, 0].tolist() == plain.forward_s[:, 0].tolist()


def test_what_is_computed_again_is_there_while_the_backward_runs():
    """Three micro-batches of inputs wait; one of them has its activations beside."""
    graph = chain([node(saved=5), node(saved=100, workspace=7)], num_bytes=3)
    order = order_by("gpipe", 2, 3)
    assert peaks_of(graph, order, (1,)) == [15, 307]
    assert peaks_of(graph, order, (1,), recompute=(1,)) == [15, 3 * 3 + 100 + 7]


def test_the_first_stage_has_no_inputs_of_others():
    assert peaks_of(kept(2), order_by("gpipe", 2, 3), (1,), recompute=(0,)) == [10, 30]


def test_a_forward_that_keeps_nothing_still_needs_its_workspace():
    """The 500 of the first operation, although the stage would keep more than that in the end."""
    graph = chain([node(saved=10, workspace=500), node(saved=900)])
    again = sliced(chain([node(), *graph.nodes]), (1,), (1,))
    assert again.forward_peak_bytes[1, 0] == 1 + 500


def test_a_stage_that_recomputes_leaves_nothing_to_its_second_half():
    """What it computed again is gone when the second half comes: memory and time agree on that."""
    graph = chain([node(), node(1.0, backward=(3.0, 5.0), saved=100)])
    again = sliced(graph, (1,), (1,), backward="split")
    assert [half[1, 0] for half in again.backward_s] == [3 + 1 + 5, 0]


@pytest.mark.parametrize("seed", range(40))
def test_recomputation_never_keeps_more_where_inputs_are_smaller(seed):
    graph = random_cost_graph(seed, least=6)
    cuts = graph.legal_cuts[len(graph.legal_cuts) // 2]
    order = order_by("gpipe", 2, 4)
    plain, again = sliced(graph, (cuts,), ()), sliced(graph, (cuts,), (0, 1))
    smaller = again.saved_bytes <= plain.saved_bytes
    peaks, less = (MemoryProfile(order).peaks(slices) for slices in (plain, again))
    # While one backward runs, its inputs and its activations are there together.
    assert (less <= peaks + again.saved_bytes)[smaller].all()
    assert (again.backward_s[0] >= plain.backward_s[0]).all()


def test_one_message_is_under_way_on_each_link_the_largest():
    """Values of 5 and 7 bytes cross to the other rank, the gradient of the first comes back; the third stays."""
    values = (
        CostValue(producer=0, readers=(1,), num_bytes=5, gradient_bytes=5),
        CostValue(producer=1, readers=(2, 3), num_bytes=7),
        CostValue(producer=2, readers=(3,), num_bytes=9),
    )
    graph = CostGraph(name="links", nodes=(node(),) * 4, values=values)
    order = order_by("looped", 2, 2, num_loops=2)
    items = items_of(graph, order, (1, 2, 3))
    # rank 0 -> 1: max(5 of stage 0, 9 of stage 2); rank 1 -> 0: max(7 of stage 1, the gradient of 5)
    assert [item.buffer_bytes for item in items] == [9 + 7, 9 + 7]
    assert [item.buffer_bytes for item in items_of(graph, order_by("gpipe", 1, 2), ())] == [0]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_one_message_is_under_way_on_each_link_and_has_memory_at_both_ends():
    """Of two that share a link the larger one; what stays on a rank is never under way."""
    graph = chain([node() for _ in range(4)], num_bytes=5, skips=[(0, 3)])
    first, second = items_of(graph, order_by("looped", 2, 2, num_loops=2), (1, 2, 3))
    # 0 -> 1 with 5 bytes for its stages 1 and 3, 2 -> 1 with 5; 1 -> 0 with 5; and the same back.
    assert (first.buffer_bytes, second.buffer_bytes) == (10, 10)
    (alone,) = items_of(graph, order_by("looped", 1, 2, num_loops=4), (1, 2, 3))
    assert alone.buffer_bytes == 0
    frozen = chain([node() for _ in range(2)], num_bytes=5, frozen=1)
    assert [item.buffer_bytes for item in items_of(frozen, order_by("1f1b", 2, 2), (1,))] == [5, 5]
