"""Sums over a slicing, and what its stages hand to each other."""

from dataclasses import replace

import pytest

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import CostTable, Edge, OpCost, OpGraph, OpNode, TensorSpec
from pfeife_accelerate.planner import (
    MessageBytes,
    edges_of,
    message_bytes_of,
    messages_of,
    stage_costs,
    stage_params,
)
from pfeife_accelerate.schedule import Message, chain_messages

F32 = TensorSpec(shape=(1,), dtype="float32", requires_grad=True)
MASK = TensorSpec(shape=(8,), dtype="bool")


def op(index, *, reads, outputs=(F32,), params=()):
    return OpNode(index=index, name=f"n{index}", target="op", inputs=(*reads, *params), outputs=outputs, params=params)


def test_sums_and_the_peak_inside_a_stage(chain):
    ops = (
        OpCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=0.5, saved_bytes=10, workspace_bytes=100),
        OpCost(forward_s=2.0, saved_bytes=20, workspace_bytes=5),
        OpCost(forward_s=4.0, backward_input_s=8.0, saved_bytes=40, workspace_bytes=0),
    )
    first, second = stage_costs(chain(3), CostTable(ops=ops), (2,))
    assert (first.forward_s, first.backward_s, first.saved_bytes, first.param_bytes) == (3.0, 1.5, 30, 8)
    # 10 saved + 100 temporary in the first operation exceed the 30 saved at the end by 80.
    assert first.workspace_bytes == 80
    assert (second.forward_s, second.backward_s, second.workspace_bytes) == (4.0, 8.0, 0)


def test_a_tied_parameter_counts_once_per_stage(chain, costs):
    tied = replace(chain(4), tied=(("layers.0.weight", "layers.1.weight", "layers.3.weight"),))
    stages = stage_costs(tied, costs([1.0] * 4), (2,))
    assert [stage.param_bytes for stage in stages] == [4, 8]
    assert stage_params(tied, (2,)) == (("layers.0.weight", "layers.1.weight"), ("layers.2.weight", "layers.3.weight"))


def test_costs_must_belong_to_the_graph(chain, costs):
    with pytest.raises(InternalError, match="PF310 2 costs for 3 operations"):
        stage_costs(chain(3), costs([1.0, 1.0]), (1,))


def test_a_plain_chain_has_the_chain_messages(chain):
    assert messages_of(chain(6), (2, 4), (0, 1, 2)) == chain_messages((0, 1, 2))


def test_a_skip_goes_directly_and_once_to_each_rank():
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
    messages = messages_of(graph, (2, 3, 4), (0, 1, 0, 1))
    assert messages == (
        Message(producer_stage=0, consumer_rank=0, consumer_stages=(2,), has_grad=False),
        Message(producer_stage=0, consumer_rank=1, consumer_stages=(1, 3), has_grad=True),
        Message(producer_stage=1, consumer_rank=0, consumer_stages=(2,), has_grad=True),
        Message(producer_stage=2, consumer_rank=1, consumer_stages=(3,), has_grad=True),
    )
    assert message_bytes_of(graph, (2, 3, 4), (0, 1, 0, 1)) == (
        MessageBytes(forward_bytes=8, gradient_bytes=0),
        MessageBytes(forward_bytes=12, gradient_bytes=4),
        MessageBytes(forward_bytes=4, gradient_bytes=4),
        MessageBytes(forward_bytes=4, gradient_bytes=4),
    )
    assert edges_of(graph, (2, 3, 4))[:2] == (
        Edge(producer=0, consumers=(1, 2, 3), value="n0", spec=MASK),
        Edge(producer=0, consumers=(1, 3), value="n1", spec=F32),
    )


def test_several_outputs_are_several_edges_and_no_outputs_none():
    graph = OpGraph(
        nodes=(op(0, reads=(), outputs=(F32, MASK)), op(1, reads=(), outputs=()), op(2, reads=("n0", "n1"))),
    )
    assert [edge.value for edge in edges_of(graph, (2,))] == ["n0.0", "n0.1"]
    only_context = OpGraph(nodes=(op(0, reads=(), outputs=()), op(1, reads=("n0",))))
    assert messages_of(only_context, (1,), (0, 1)) == ()
