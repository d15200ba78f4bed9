"""Cuts by name."""

from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import OpGraph, OpNode, TensorSpec
from pfeife_accelerate.planner import cuts_at


def transformer(num_layers):
    """embed, then per layer: a norm in two operations (the second reads the weight), a projection, a residual add."""
    value = TensorSpec(shape=(4,), dtype="float32", requires_grad=True)
    nodes, params = [], []

    def add(name, reads, *own):
        nodes.append(
            OpNode(index=len(nodes), name=name, target="op", inputs=(*reads, *own), outputs=(value,), params=own,
                   source_line=f"{name}.py:1")
        )  # fmt: skip
        params.extend((param, value) for param in own)

    add("embed", ("ids",), "model.embed.weight")
    hidden = "embed"
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        add(f"pow_{layer}", (hidden,))
        add(f"norm_{layer}", (hidden, f"pow_{layer}"), f"{prefix}.norm.weight")
        add(f"proj_{layer}", (f"norm_{layer}",), f"{prefix}.proj.weight")
        add(f"add_{layer}", (hidden, f"proj_{layer}"))
        hidden = f"add_{layer}"
    return OpGraph(nodes=tuple(nodes), inputs=(("ids", value),), params=tuple(params))


def starts(graph, split_points):
    return [graph.nodes[cut].name for cut in cuts_at(graph, split_points, len(split_points) + 1)]


def test_a_module_starts_a_stage_where_least_crosses():
    graph = transformer(4)
    # Not at norm_2, the first to read a weight of layer 2: there pow_2 would cross as well.
    assert starts(graph, ("model.layers.2",)) == ["pow_2"]
    assert starts(graph, ("model.layers.3", "model.layers.1")) == ["pow_1", "pow_3"]


def test_operations_and_parameters_are_split_points_too():
    graph = transformer(2)
    assert starts(graph, ("proj_1",)) == ["proj_1"]
    assert starts(graph, ("model.layers.1.proj.weight",)) == ["proj_1"]


def test_a_split_point_moves_back_to_the_nearest_legal_cut():
    graph = transformer(2)
    nodes = tuple(replace(n, cut_allowed=n.name not in ("pow_1", "norm_1", "add_0")) for n in graph.nodes)
    graph = replace(graph, nodes=nodes)
    assert starts(graph, ("model.layers.1",)) == ["proj_0"]
    assert starts(graph, ("norm_1",)) == ["proj_0"]


@pytest.mark.parametrize(
    ("split_points", "num_stages", "message"),
    [
        (("model.layers.9",), 2, r"PF304 unknown split point 'model.layers.9'(.|\n)*did you mean 'model.layers.\d'"),
        (("model.layer.1",), 2, r"PF304(.|\n)*did you mean 'model.layers.1'"),
        (("model.layers.1",), 3, r"PF303 1 split points for 3 stages(.|\n)*need 2 split points"),
        (("model.embed",), 2, "PF305 no cut is possible at split point 'model.embed'"),
        (("model.layers.1", "pow_1"), 3, "PF305 split points 'model.layers.1' and 'pow_1' are the same position"),
    ],
)
def test_wrong_split_points(split_points, num_stages, message):
    graph = transformer(3)
    with pytest.raises(PfeifeError, match=message):
        cuts_at(graph, split_points, num_stages)
