"""Cuts against brute force, and cuts by name."""

import time
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostTable, OpCost, OpGraph, OpNode, TensorSpec
from pfeife_accelerate.planner import cuts_at, equal_memory, equal_time, legal_cuts


def measures(graph, costs, machine, cuts):
    """(slowest stage, largest stage) of a slicing, straight from the definition."""
    bounds = (0, *cuts, len(graph.nodes))
    times, sizes = [], []
    params = dict(graph.params)
    for first, last in pairwise(bounds):
        stage = range(first, last)
        seconds = sum(costs.ops[i].forward_s + costs.ops[i].backward_s for i in stage)
        if first:
            seconds += machine.link.latency_s + graph.crossing_bytes[first] / machine.link.bytes_per_s
        if last < len(graph.nodes) and graph.crossing_gradient_bytes[last]:
            seconds += machine.link.latency_s + graph.crossing_gradient_bytes[last] / machine.link.bytes_per_s
        times.append(seconds)
        weights = sum(params[name].num_bytes for i in stage for name in graph.nodes[i].params)
        sizes.append(4 * weights + sum(costs.ops[i].saved_bytes for i in stage))
    return max(times), max(sizes)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_equal_time_is_the_best_of_all_slicings(random_graph, machine, num_stages):
    link = machine(latency_s=0.5, bytes_per_s=8.0)
    tried = 0
    for seed in range(60):
        graph, costs = random_graph(seed)
        positions = legal_cuts(graph)
        if len(positions) < num_stages - 1:
            continue
        tried += 1
        best = min(measures(graph, costs, link, cuts) for cuts in combinations(positions, num_stages - 1))
        cuts = equal_time(graph, costs, link, num_stages).cuts
        assert set(cuts) <= set(positions)
        assert measures(graph, costs, link, cuts) == pytest.approx(best)
        least = min(measures(graph, costs, link, cuts)[::-1] for cuts in combinations(positions, num_stages - 1))
        cuts = equal_memory(graph, costs, link, num_stages).cuts
        assert measures(graph, costs, link, cuts)[::-1] == pytest.approx(least)
    assert tried > 40


def test_an_even_chain_is_cut_evenly(chain, costs, machine):
    assert equal_time(chain(12), costs([1.0] * 12), machine(), 4).cuts == (3, 6, 9)


def test_one_stage_has_no_cut(chain, costs, machine):
    assert equal_time(chain(3), costs([1.0] * 3), machine(), 1).cuts == ()
    assert equal_memory(chain(3), costs([1.0] * 3), machine(), 1).cuts == ()


def test_cuts_avoid_forbidden_positions(chain, costs, machine):
    assert equal_time(chain(4, forbidden=(2,)), costs([1.0] * 4), machine(), 2).cuts in ((1,), (3,))


def test_a_dear_cut_is_avoided(chain, costs, machine):
    # The middle is crossed by three values, its neighbour by one.
    graph = chain(6, skips=((0, 3), (1, 3)))
    assert equal_time(graph, costs([1.0] * 6), machine(), 2).cuts == (3,)
    assert equal_time(graph, costs([1.0] * 6), machine(bytes_per_s=2.0), 2).cuts == (4,)


def test_too_few_legal_positions(chain, costs, machine):
    graph = chain(5, forbidden=(1, 2))
    with pytest.raises(PfeifeError) as error:
        equal_time(graph, costs([1.0] * 5), machine(), 4)
    assert str(error.value).splitlines() == [
        "PF301 the model cannot be cut into 4 stages",
        "  where  5 operations, 2 positions where a cut is legal",
        "  why    4 stages need 3 cuts",
        "  try    at most 3 stages: fewer processes or num_loops=1",
    ]


def test_a_large_graph_is_cut_quickly_and_well(chain, costs, machine):
    graph, table = chain(5300), costs([1.0 + (i * 7919 % 13) for i in range(5300)])
    start = time.perf_counter()
    cuts = equal_time(graph, table, machine(), 24).cuts
    assert time.perf_counter() - start < 5.0
    total = sum(op.forward_s + op.backward_s for op in table.ops)
    assert measures(graph, table, machine(), cuts)[0] < 1.02 * total / 24


def test_thinning_keeps_the_narrow_positions(costs, machine):
    """One narrow position in every ten, in a graph larger than the search looks at position by position."""
    wide, narrow = (TensorSpec(shape=(n,), dtype="float32", requires_grad=True) for n in (1000, 1))
    nodes = tuple(
        OpNode(index=i, name=f"n{i}", target="op", inputs=(f"n{i - 1}",) if i else (),
               outputs=(narrow if i % 10 == 9 else wide,))
        for i in range(4000)
    )  # fmt: skip
    cuts = equal_time(OpGraph(nodes=nodes), costs([0.01] * 4000), machine(bytes_per_s=1e3), 4).cuts
    assert all(cut % 10 == 0 for cut in cuts)


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
    graph = OpGraph(nodes=tuple(nodes), inputs=(("ids", value),), params=tuple(params))
    return graph, CostTable(ops=(OpCost(forward_s=1.0),) * len(nodes))


def starts(graph, split_points):
    cuts = cuts_at(graph, split_points, len(split_points) + 1).cuts
    return [graph.nodes[cut].name for cut in cuts]


def test_a_module_starts_a_stage_where_least_crosses():
    graph, costs = transformer(4)
    # Not at norm_2, the first to read a weight of layer 2: there pow_2 would cross as well.
    assert starts(graph, ("model.layers.2",)) == ["pow_2"]
    assert starts(graph, ("model.layers.3", "model.layers.1")) == ["pow_1", "pow_3"]
    assert equal_time(graph, costs, None, 2, ("model.layers.2",)).cuts == cuts_at(graph, ("model.layers.2",), 2).cuts


def test_operations_and_parameters_are_split_points_too():
    graph, _ = transformer(2)
    assert starts(graph, ("proj_1",)) == ["proj_1"]
    assert starts(graph, ("model.layers.1.proj.weight",)) == ["proj_1"]


def test_a_split_point_moves_back_to_the_nearest_legal_cut():
    graph, _ = transformer(2)
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
    graph, _ = transformer(3)
    with pytest.raises(PfeifeError, match=message):
        cuts_at(graph, split_points, num_stages)
