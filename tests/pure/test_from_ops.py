"""A captured graph with its costs becomes the planner's graph, and nothing is lost or counted twice."""

from dataclasses import replace

import pytest

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import CostTable, CostValue, OpCost, OpGraph, OpNode, TensorSpec, cost_graph_of

VALUE = TensorSpec(shape=(3,), dtype="float32", requires_grad=True)
MASK = TensorSpec(shape=(8,), dtype="bool")
WEIGHT = TensorSpec(shape=(10,), dtype="float32", requires_grad=True)


def op(index, *inputs, outputs=(VALUE,), params=(), cut_allowed=True):
    return OpNode(index=index, name=f"n{index}", target="op", inputs=(*inputs, *params), outputs=outputs,
                  params=params, cut_allowed=cut_allowed)  # fmt: skip


def tied_graph():
    """An embedding and a head that share a weight; the second operation makes a value and a mask."""
    return OpGraph(
        nodes=(
            op(0, "x", params=("embed", "table")),
            op(1, "n0", outputs=(VALUE, MASK), params=("mid",)),
            op(2, "n1", cut_allowed=False, params=("frozen",)),
            op(3, "n2", "n1", "n0", params=("head", "embed")),
        ),
        inputs=(("x", VALUE),),
        outputs=("n3",),
        params=(("embed", WEIGHT), ("mid", WEIGHT), ("frozen", replace(WEIGHT, requires_grad=False)),
                ("head", WEIGHT), ("table", MASK)),
        tied=(("embed", "head"),),
    )  # fmt: skip


#: The result, and a softmax of it or the like.
KEPT_BY_LOSS = 2 * VALUE.num_bytes


def made(state=None):
    costs = [
        OpCost(forward_s=i + 1.0, backward_input_s=0.5, backward_weight_s=0.25, saved_bytes=i, workspace_bytes=9)
        for i in range(4)
    ]
    return cost_graph_of(tied_graph(), CostTable(ops=tuple(costs)), state)


def test_costs_and_legal_cuts_are_taken_over():
    graph = made()
    assert [(n.forward_s, n.backward_input_s, n.backward_weight_s, n.saved_bytes, n.workspace_bytes) for n in
            graph.nodes] == [(i + 1.0, 0.5, 0.25, i + (i == 3) * KEPT_BY_LOSS, 9) for i in range(4)]  # fmt: skip
    assert graph.legal_cuts == (1, 3)
    assert graph.fingerprint == tied_graph().fingerprint


def test_each_tensor_is_a_value_with_its_readers_and_what_nobody_reads_is_none():
    assert made().values == (
        CostValue(producer=0, readers=(1, 3), num_bytes=12, gradient_bytes=12),
        CostValue(producer=1, readers=(2, 3), num_bytes=12, gradient_bytes=12),
        CostValue(producer=1, readers=(2, 3), num_bytes=8, gradient_bytes=0),
        CostValue(producer=2, readers=(3,), num_bytes=12, gradient_bytes=12),
    )


def test_values_agree_with_what_crosses_in_the_operations(random_graph):
    for seed in range(20):
        ops, costs = random_graph(seed)
        graph = cost_graph_of(ops, costs)
        for position in range(len(ops.nodes) + 1):
            crossing = [v for v in graph.values if v.producer < position <= v.readers[-1]]
            assert sum(v.num_bytes for v in crossing) == ops.crossing_bytes[position]
            assert sum(v.gradient_bytes for v in crossing) == ops.crossing_gradient_bytes[position]


def test_a_tied_parameter_has_one_owner_and_counts_once_an_operation():
    graph = made()
    embed, table = graph.nodes[0].params
    assert graph.nodes[3].params == (embed,)
    assert len({embed.owner, table.owner, graph.nodes[1].params[0].owner, graph.nodes[2].params[0].owner}) == 4


def test_without_knowledge_trained_parameters_take_four_times_their_bytes_and_others_themselves():
    graph = made()
    embed, table = graph.nodes[0].params
    assert (embed.num_bytes, embed.state_bytes, embed.optimizer_s) == (40, 160, 0.0)
    assert (table.num_bytes, table.state_bytes) == (8, 8)
    assert graph.nodes[2].params[0].state_bytes == 40


def test_the_optimizers_state_is_taken_by_any_name_of_a_parameter():
    graph = made({"head": (80, 0.5), "mid": (120, 0.25)})
    assert (graph.nodes[0].params[0].state_bytes, graph.nodes[0].params[0].optimizer_s) == (80, 0.5)
    assert graph.nodes[3].params[0] == graph.nodes[0].params[0]
    assert (graph.nodes[1].params[0].state_bytes, graph.nodes[1].params[0].optimizer_s) == (120, 0.25)


def test_a_model_that_gives_its_loss_leaves_nothing_to_a_loss_outside():
    graph = tied_graph()
    single = replace(graph.nodes[3], outputs=(replace(VALUE, shape=()),))
    costs = CostTable(ops=tuple(OpCost(forward_s=1.0) for _ in graph.nodes))
    assert cost_graph_of(graph, costs).nodes[3].saved_bytes == KEPT_BY_LOSS
    inside = cost_graph_of(replace(graph, nodes=(*graph.nodes[:3], single)), costs)
    assert [node.saved_bytes for node in inside.nodes] == [0] * 4


def test_a_loss_outside_takes_time_by_the_size_of_what_it_reads():
    graph, costs = tied_graph(), CostTable(ops=tuple(OpCost(forward_s=1.0, backward_input_s=1.0) for _ in range(4)))
    nodes = cost_graph_of(graph, costs, bytes_per_s=VALUE.num_bytes).nodes
    assert [node.forward_s for node in nodes[:3]] == [1.0] * 3 and nodes[3].forward_s > 3.0
    assert nodes[3].backward_input_s - 1.0 > nodes[3].forward_s - 1.0
    assert cost_graph_of(graph, costs).nodes[3].forward_s == 1.0, "with nothing known of the device"


def test_costs_of_another_graph_are_refused():
    with pytest.raises(InternalError, match="PF154 1 costs for a graph of 4 operations"):
        cost_graph_of(tied_graph(), CostTable(ops=(OpCost(forward_s=1.0),)))
