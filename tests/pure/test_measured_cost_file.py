"""A cost file of a real launch says all that the planner is told there."""

from dataclasses import replace

import pytest

from pfeife_accelerate.ir import (
    CostGraph,
    CostNode,
    CostValue,
    DeviceSpec,
    LinkSpec,
    Machine,
    ParamUse,
    read_cost_file,
    write_cost_file,
)

GRAPH = CostGraph(
    name="lora",
    nodes=(
        CostNode(op="embedding", forward_s=1e-3, params=(ParamUse(owner=0, num_bytes=100, state_bytes=100),)),
        CostNode(op="linear", forward_s=2e-3, backward_input_s=3e-3, backward_weight_s=4e-3, saved_bytes=5,
                 workspace_bytes=6,
                 params=(ParamUse(owner=1, num_bytes=10, state_bytes=40, optimizer_s=1e-5),), cut_allowed=False),
    ),
    values=(CostValue(producer=0, readers=(1,), num_bytes=7),),
)  # fmt: skip
DEVICE = DeviceSpec(name="cpu", memory_bytes=10**9, flops_per_s=(), bytes_per_s=0.0, launch_s=0.0, action_s=1e-4,
                    runs_ahead=False)  # fmt: skip
MACHINE = Machine(devices=(DEVICE,), link=LinkSpec(latency_s=1e-4, bytes_per_s=1e9), ranks_per_host=2,
                  link_between_hosts=LinkSpec(latency_s=1e-3, bytes_per_s=1e8))  # fmt: skip


@pytest.mark.parametrize("name", ["cost.json", "cost.json.gz"])
def test_hosts_host_time_and_each_parameters_own_state_survive(tmp_path, name):
    write_cost_file(tmp_path / name, GRAPH, MACHINE)
    graph, machine = read_cost_file(tmp_path / name)
    # Seconds are written as milliseconds.
    assert graph.nodes[1].backward_weight_s == pytest.approx(4e-3)
    assert [node.params[0].state_bytes for node in graph.nodes] == [100, 40]  # a frozen parameter and an adapter
    assert [node.cut_allowed for node in graph.nodes] == [True, False]
    assert graph.values == GRAPH.values
    device = machine.device_of(0)
    assert (device.runs_ahead, device.action_s) == (False, pytest.approx(1e-4))
    assert machine.ranks_per_host == 2
    assert machine.link_of(0, 1).bytes_per_s == pytest.approx(1e9)
    assert machine.link_of(1, 2).latency_s == pytest.approx(1e-3)


def test_one_host_has_one_link(tmp_path):
    write_cost_file(tmp_path / "cost.json", GRAPH, replace(MACHINE, ranks_per_host=None, link_between_hosts=None))
    _, machine = read_cost_file(tmp_path / "cost.json")
    assert machine.ranks_per_host is machine.link_between_hosts is None
