"""Tensors, graphs, machines, actions, specs: plain data and what follows from it."""

from dataclasses import FrozenInstanceError, replace

import pytest

from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.ir import (
    Action,
    ActionKind,
    DeviceSpec,
    Interval,
    LinkSpec,
    OpNode,
    ScheduleFamily,
    ScheduleSpec,
    Slicing,
    TensorSpec,
    Timeline,
    parse_family,
)


def test_tensor_sizes():
    spec = TensorSpec(shape=(2, 3), dtype="bfloat16")
    assert (spec.numel, spec.num_bytes, spec.requires_grad) == (6, 12, False)
    assert TensorSpec(shape=(), dtype="int64").num_bytes == 8
    assert TensorSpec(shape=(0, 5), dtype="bool").num_bytes == 0


def test_unknown_element_type_suggests_the_nearest():
    with pytest.raises(PfeifeError, match=r"PF150 unknown element type 'flot32'(.|\n)*did you mean 'float32'"):
        _ = TensorSpec(shape=(1,), dtype="flot32").num_bytes


def test_facts_are_frozen():
    with pytest.raises(FrozenInstanceError):
        TensorSpec(shape=(), dtype="bool").dtype = "int8"


def test_what_crosses_each_position(chain):
    graph = chain(4, skips=((0, 3),))
    assert [graph.crossing(p) for p in range(5)] == [(), ("n0",), ("n0", "n1"), ("n0", "n2"), ()]
    assert graph.crossing_bytes == (0, 4, 8, 8, 0)
    assert graph.crossing_gradient_bytes == (0, 4, 8, 8, 0)


def test_crossing_sizes_agree_with_crossing_names(random_graph):
    for seed in range(30):
        graph, _ = random_graph(seed)
        for position in range(len(graph.nodes) + 1):
            names = graph.crossing(position)
            crossing = [node for node in graph.nodes if node.name in names]
            assert graph.crossing_bytes[position] == sum(node.num_bytes for node in crossing)
            assert graph.crossing_gradient_bytes[position] == sum(node.gradient_bytes for node in crossing)


def test_graph_inputs_and_parameters_never_cross(chain):
    graph = chain(3)
    late = replace(graph.nodes[2], inputs=("x", "n1", "layers.0.weight"))
    assert replace(graph, nodes=(*graph.nodes[:2], late)).crossing_bytes == (0, 4, 4, 0)


def test_fingerprint_is_about_structure(chain):
    graph = chain(3)
    assert graph.fingerprint == chain(3).fingerprint
    moved = replace(graph, nodes=(*graph.nodes[:2], replace(graph.nodes[2], source_line="elsewhere.py:1")))
    assert moved.fingerprint == graph.fingerprint
    for other in (chain(4), chain(3, width=2), chain(3, skips=((0, 2),)), chain(3, forbidden=(1,)),
                  replace(graph, tied=(("layers.0.weight", "layers.1.weight"),))):  # fmt: skip
        assert other.fingerprint != graph.fingerprint


def test_a_graph_out_of_order_is_refused(chain):
    graph = chain(2)
    with pytest.raises(InternalError, match=r"PF151 operation 'n1' at position 0 is out of order"):
        replace(graph, nodes=graph.nodes[::-1])
    with pytest.raises(InternalError, match=r"unknown inputs \['y'\]"):
        replace(graph, nodes=(OpNode(index=0, name="a", target="t", inputs=("y",), outputs=()),))


def test_tied_parameters_have_one_owner(chain):
    graph = replace(chain(2), tied=(("layers.0.weight", "layers.1.weight"),))
    assert graph.owner_of == {"layers.0.weight": "layers.0.weight", "layers.1.weight": "layers.0.weight"}


def test_link_and_device():
    assert LinkSpec(latency_s=1.0, bytes_per_s=4.0).transfer_s(8) == 3.0
    device = DeviceSpec(
        name="d", memory_bytes=1, flops_per_s=(("float32", 2.0), ("bfloat16", 8.0)), bytes_per_s=1.0, launch_s=0.0
    )
    assert device.flops_per_s_of("bfloat16") == 8.0
    assert device.flops_per_s_of("float64") == 2.0
    with pytest.raises(PfeifeError, match="PF152"):
        replace(device, flops_per_s=()).flops_per_s_of("float32")


def test_the_machine_has_one_device_for_all_or_one_each(machine):
    one = machine()
    assert one.device_of(5) is one.devices[0]
    two = replace(one, devices=(one.devices[0], replace(one.devices[0], name="other")))
    assert two.device_of(1).name == "other"


@pytest.mark.parametrize(
    "text", ["2F0", "0B12", "3I1", "3W1", "1SEND_F3>2@0", "1RECV_F3>12@10", "0SEND_B0>1@1", "0RECV_B2>1@1"]
)
def test_actions_read_as_they_print(text):
    assert str(Action.parse(text)) == text


def test_action_fields():
    expected = Action(kind=ActionKind.SEND_F, stage=1, microbatch=3, reader=4, peer=0)
    assert Action.parse("1SEND_F3>4@0") == expected


@pytest.mark.parametrize(
    "text", ["", "F0", "2X0", "2F", "2F0@", "2F0@1", "2F0>3@1", "2F0 2F1", "1SEND_F3", "1SEND_F3@0", "1SEND_F3>4"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(PfeifeError, match="PF211"):
        Action.parse(text)


def test_families_by_name():
    assert parse_family("GPipe") is ScheduleFamily.GPIPE
    with pytest.raises(PfeifeError, match=r"PF212 unknown schedule 'lopped'(.|\n)*did you mean 'looped'"):
        parse_family("lopped")
    with pytest.raises(PfeifeError, match=r"PF212 unknown schedule ''(.|\n)*try +auto"):
        parse_family("")


@pytest.mark.parametrize(
    ("family", "numbers", "message"),
    [
        ("gpipe", {"num_ranks": 0}, "num_ranks=0"),
        ("gpipe", {"num_microbatches": 0}, "num_microbatches=0"),
        ("gpipe", {"num_loops": 0}, "num_loops=0"),
        ("gpipe", {"prefetch_forwards": 1}, "nothing to prefetch"),
        ("1f1b", {"prefetch_forwards": -1}, "at least 0"),
        ("1f1b", {"num_loops": 2}, "one stage on each rank"),
        ("1f1b", {"microbatches_per_loop": 2}, "only the looped schedule"),
        ("looped", {"microbatches_per_loop": 5}, "at most all of them"),
        ("looped", {"microbatches_per_loop": 0}, "at least 1 micro-batch"),
    ],
)
def test_impossible_specs_are_refused(family, numbers, message):
    with pytest.raises(PfeifeError, match="PF210") as error:
        ScheduleSpec(**{"family": ScheduleFamily(family), "num_ranks": 2, "num_microbatches": 4, **numbers})
    assert message in str(error.value)


def test_the_default_block_is_one_micro_batch_per_rank():
    spec = ScheduleSpec(family=ScheduleFamily.LOOPED, num_ranks=4, num_microbatches=8, num_loops=2)
    assert (spec.block, spec.num_stages) == (4, 8)
    assert replace(spec, num_microbatches=3).block == 3


def test_slicing_ranges():
    assert Slicing(cuts=(2, 5)).ranges(7) == ((0, 2), (2, 5), (5, 7))


def test_timeline_length_and_busy_time():
    def interval(text, rank, start_s, end_s):
        return Interval(action=Action.parse(text), rank=rank, start_s=start_s, end_s=end_s)

    timeline = Timeline(intervals=(interval("0F0", 0, 0.0, 1.0), interval("0SEND_F0>1@1", 0, 1.0, 4.0)))
    assert (timeline.makespan_s, timeline.busy_s(0), timeline.busy_s(1)) == (4.0, 1.0, 0.0)
    assert Timeline(intervals=()).makespan_s == 0.0
