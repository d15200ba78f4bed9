"""What a plan says by name: parameters of stages, tensors that leave them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pfeife_accelerate.ir import Edge, OpGraph, OpNode, TensorSpec, cost_graph_of, from_json, to_json
from pfeife_accelerate.planner import SearchOptions, make_plan, pipeline_plan
from pfeife_accelerate.planner.pipeline_plan import edges_of, stage_params

F32 = TensorSpec(shape=(1,), dtype="float32", requires_grad=True)
MASK = TensorSpec(shape=(8,), dtype="bool")


def op(index, *, reads, outputs=(F32,), params=()):
    return OpNode(index=index, name=f"n{index}", target="op", inputs=(*reads, *params), outputs=outputs, params=params)


def test_a_plan_is_whole(chain, costs, machine):
    ops = chain(8, skips=((0, 7),))
    planned = make_plan(cost_graph_of(ops, costs([1.0] * 8)), machine(), 2, 4, SearchOptions(schedule="1f1b"))
    plan = pipeline_plan(planned, ops)
    assert plan.graph_fingerprint == ops.fingerprint
    assert plan.cuts == (4,)
    assert [s.op_range for s in plan.stages] == [(0, 4), (4, 8)]
    assert plan.stages[1].params == tuple(f"layers.{i}.weight" for i in range(4, 8))
    assert plan.stage_ranks == (0, 1)
    assert [(edge.producer, edge.consumers, edge.value) for edge in plan.edges] == [(0, (1,), "n0"), (0, (1,), "n3")]
    assert plan.estimate_s == pytest.approx((4 + 1) * 4 * 3.0)
    assert 0 < plan.lower_bound_s <= plan.estimate_s
    assert plan.schedule == planned.schedule
    assert from_json(to_json(plan)) == plan


def test_without_operations_it_has_no_names(chain, costs, machine):
    ops = chain(8)
    planned = make_plan(cost_graph_of(ops, costs([1.0] * 8)), machine(), 2, 4)
    with_names, without = pipeline_plan(planned, ops), pipeline_plan(planned)
    assert {stage.params for stage in without.stages} == {()}
    assert replace(with_names, edges=(), stages=without.stages) == without
    assert [stage.cost for stage in with_names.stages] == [stage.cost for stage in without.stages]


def test_a_tied_parameter_is_named_by_each_stage_that_reads_it(chain, costs):
    tied = replace(chain(4), tied=(("layers.0.weight", "layers.1.weight", "layers.3.weight"),))
    assert stage_params(tied, (2,)) == (("layers.0.weight", "layers.1.weight"), ("layers.2.weight", "layers.3.weight"))


def test_a_tensor_leaves_its_stage_for_all_later_ones_that_read_it():
    graph = OpGraph(
        nodes=(
            op(0, reads=("x",), outputs=(MASK,)),
            op(1, reads=("x",)),
            op(2, reads=("n1", "n0")),
            op(3, reads=("n2", "n0")),
            op(4, reads=("n3", "n0", "n1")),
        ),
        inputs=(("x", F32),),
    )
    assert edges_of(graph, (2, 3, 4))[:2] == (
        Edge(producer=0, consumers=(1, 2, 3), value="n0", spec=MASK),
        Edge(producer=0, consumers=(1, 3), value="n1", spec=F32),
    )


def test_a_copied_value_leaves_no_stage_and_is_named(chain, costs, machine):
    ops = chain(8, skips=((0, 7),))
    table = costs([1.0] * 8)
    graph = cost_graph_of(ops, table, copied=(0,))
    assert [v for v in graph.values if v.producer == 0] == []
    assert [v for v in cost_graph_of(ops, table).values if v.producer != 0] == list(graph.values)
    plan = pipeline_plan(make_plan(graph, machine(), 2, 4, SearchOptions(schedule="1f1b")), ops, copied=(0,))
    assert plan.copied_values == (ops.nodes[0].name,)
    assert [edge.value for edge in edges_of(ops, (1, 4))] == [ops.nodes[0].name, ops.nodes[3].name]
    assert [edge.value for edge in edges_of(ops, (1, 4), (0,))] == [ops.nodes[3].name]
    assert plan.graph_fingerprint == ops.fingerprint


def test_several_outputs_are_several_edges_and_no_outputs_none():
    graph = OpGraph(
        nodes=(op(0, reads=(), outputs=(F32, MASK)), op(1, reads=(), outputs=()), op(2, reads=("n0", "n1"))),
    )
    assert [edge.value for edge in edges_of(graph, (2,))] == ["n0.0", "n0.1"]
    only_context = OpGraph(nodes=(op(0, reads=(), outputs=()), op(1, reads=("n0",))))
    assert edges_of(only_context, (1,)) == ()
