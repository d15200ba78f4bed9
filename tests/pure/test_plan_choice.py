"""How many micro-batches and replicas `pfeife plan` tries, and what it chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, CostNode, CostValue, LinkSpec, ParamUse
from pfeife_accelerate.tools.plan_choice import Shape, all_reduce_s, choose, microbatch_numbers, shapes
from tests.simple_planner import simple_plan


def graph_of(rows, *, overhead_s=0.0, kept=0):
    """Four equal operations, each with a parameter of 100 bytes; a row takes one second forward, two backward."""
    nodes = tuple(
        CostNode(
            op="linear", forward_s=rows + overhead_s, backward_input_s=float(rows), backward_weight_s=float(rows),
            saved_bytes=rows * kept, params=(ParamUse(owner=index, num_bytes=100, state_bytes=400),),
        )
        for index in range(4)
    )  # fmt: skip
    values = tuple(CostValue(producer=i, readers=(i + 1,), num_bytes=1) for i in range(3))
    return CostGraph(name="chain", nodes=nodes, values=values)


def search(graph, num_ranks, num_microbatches, effort):
    return simple_plan(graph, num_ranks, num_microbatches, limit_bytes=10_000)


def chosen(candidates, machine, *, num_ranks=2, told=None, **kwargs):
    tell = (lambda shape: None) if told is None else told.append
    graphs = lambda rows: graph_of(rows, **kwargs)  # noqa: E731
    return choose(candidates, graphs, search, machine, num_ranks, effort="full", tell=tell)


def test_numbers_divide_the_batch_where_they_can():
    assert microbatch_numbers(96, 8) == (4, 8, 12, 16, 24, 32, 48)
    assert microbatch_numbers(7, 2) == (1, 2, 3, 4, 7)
    assert microbatch_numbers(1, 8) == (1,)


def test_batch_norm_wants_more_than_a_row():
    assert max(microbatch_numbers(16, 8, least_rows=2)) == 8


def test_no_two_numbers_lead_to_the_same_rows():
    for batch in range(1, 60):
        for ranks in (1, 2, 3, 8):
            rows = [-(-batch // number) for number in microbatch_numbers(batch, ranks)]
            assert len(set(rows)) == len(rows)


def test_shapes_of_open_numbers():
    found = shapes(batch=8, num_ranks=4, num_microbatches=None, num_replicas=None)
    assert {shape.num_replicas for shape in found} == {1, 2, 4}
    assert all(shape.rows * shape.num_microbatches >= 8 // shape.num_replicas for shape in found)
    assert shapes(batch=9, num_ranks=4, num_microbatches=2, num_replicas=None) == (
        Shape(num_replicas=1, num_microbatches=2, rows=5),
    )


def test_shapes_as_people_say_them():
    assert str(Shape(num_replicas=1, num_microbatches=1, rows=12)) == "1 micro-batch of 12 rows"
    assert str(Shape(num_replicas=2, num_microbatches=6, rows=1)) == "2 replicas, 6 micro-batches of 1 row"


def test_small_micro_batches_win_until_their_overhead_does(machine):
    candidates = shapes(batch=16, num_ranks=2, num_microbatches=None, num_replicas=1)
    told = []
    free = chosen(candidates, machine(), told=told)
    assert free.shape.num_microbatches == 16
    assert told == [*candidates, free.shape]  # all of them quickly, what is near the best in earnest
    assert free.attempts[0].shape == free.shape
    assert chosen(candidates, machine(), overhead_s=3.0).shape.num_microbatches < 16


def test_shapes_whose_quick_plans_are_close_are_planned_in_earnest(machine):
    candidates = [Shape(num_replicas=1, num_microbatches=number, rows=1) for number in (1, 2, 3, 4, 5)]
    quick = {1: 1.0, 2: 1.01, 3: 1.02, 4: 1.025, 5: 1.5}
    full = {1: 1.0, 2: 0.9, 3: 0.95, 4: 0.5, 5: 0.4}
    asked = []

    def fake(graph, num_ranks, num_microbatches, effort):
        asked.append((num_microbatches, effort))
        times = quick if effort == "quick" else full
        return replace(simple_plan(graph, num_ranks, num_microbatches), estimate_s=times[num_microbatches])

    best = choose(candidates, graph_of, fake, machine(), 2, effort="full", tell=lambda shape: None)
    assert [number for number, effort in asked if effort == "full"] == [1, 2, 3]
    assert best.shape.num_microbatches == 2 and best.step_s == 0.9
    assert [attempt.step_s for attempt in best.attempts] == sorted(quick.values())


def test_what_does_not_fit_is_not_chosen_and_says_why(machine):
    candidates = shapes(batch=16, num_ranks=2, num_microbatches=None, num_replicas=1)
    choice = chosen(candidates, machine(), overhead_s=100.0, kept=500)
    assert choice.shape.rows < 16
    assert "no plan fits" in choice.attempts[-1].problem.what


def test_the_error_of_the_most_micro_batches_tells_why_nothing_fits(machine):
    candidates = shapes(batch=16, num_ranks=2, num_microbatches=None, num_replicas=1)
    with pytest.raises(PfeifeError, match="PF302 no plan fits"):
        chosen(candidates, machine(), kept=10**6)
    with pytest.raises(PfeifeError, match="PF302 no plan fits"):
        chosen(candidates[:1], machine(), kept=10**6)


def test_replicas_add_up_their_gradients_in_a_ring(machine):
    slow = replace(machine(), link=LinkSpec(latency_s=1.0, bytes_per_s=10.0))
    graph = graph_of(1)
    two = Shape(num_replicas=2, num_microbatches=2, rows=1)
    # 200 bytes of parameters a rank, in two parts: each is sent twice, 1 s + 100 bytes / 10 bytes a second.
    assert all_reduce_s(simple_plan(graph, 2, 2), graph, slow, two) == pytest.approx(22.0)
    assert all_reduce_s(simple_plan(graph, 2, 2), graph, slow, replace(two, num_replicas=1)) == 0.0


def test_the_ring_between_hosts_takes_the_slow_link(machine):
    hosts = replace(
        machine(),
        link=LinkSpec(latency_s=0.0, bytes_per_s=1e9),
        ranks_per_host=2,
        link_between_hosts=LinkSpec(latency_s=0.0, bytes_per_s=10.0),
    )
    graph = graph_of(1)
    two = Shape(num_replicas=2, num_microbatches=2, rows=1)
    assert all_reduce_s(simple_plan(graph, 2, 2), graph, hosts, two) == pytest.approx(20.0)


def test_frozen_parameters_are_not_added_up(machine):
    graph = graph_of(1)
    frozen = replace(
        graph, nodes=tuple(replace(n, params=(replace(n.params[0], state_bytes=100),)) for n in graph.nodes)
    )
    slow = replace(machine(), link=LinkSpec(latency_s=0.0, bytes_per_s=1.0))
    two = Shape(num_replicas=2, num_microbatches=2, rows=1)
    assert all_reduce_s(simple_plan(frozen, 2, 2), frozen, slow, two) == 0.0
