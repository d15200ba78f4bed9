"""Builders shared by the pure tests: small graphs, even costs, a machine with or without transfer time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pfeife_accelerate.ir import (
    CostTable,
    DeviceSpec,
    LinkSpec,
    Machine,
    OpCost,
    OpGraph,
    OpNode,
    StageCost,
    TensorSpec,
)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.pure)


def _machine(*, latency_s=0.0, bytes_per_s=float("inf"), memory_bytes=10**12):
    device = DeviceSpec(
        name="test", memory_bytes=memory_bytes, flops_per_s=(("float32", 1e12),), bytes_per_s=1e11, launch_s=0.0
    )
    return Machine(devices=(device,), link=LinkSpec(latency_s=latency_s, bytes_per_s=bytes_per_s))


def _chain(num_ops, *, skips=(), forbidden=(), width=1):
    """n0 -> n1 -> ... with a parameter `layers.<i>.weight` of 4 bytes each; `skips`: extra (producer, reader) pairs."""
    weight = TensorSpec(shape=(1,), dtype="float32", requires_grad=True)
    value = TensorSpec(shape=(width,), dtype="float32", requires_grad=True)
    nodes = []
    for index in range(num_ops):
        reads = [f"n{index - 1}"] if index else ["x"]
        reads += [f"n{producer}" for producer, reader in skips if reader == index]
        param = f"layers.{index}.weight"
        nodes.append(
            OpNode(
                index=index,
                name=f"n{index}",
                target="linear",
                inputs=(*reads, param),
                outputs=(value,),
                params=(param,),
                source_line=f"model.py:{index}",
                cut_allowed=index not in forbidden,
            )
        )
    params = tuple((f"layers.{index}.weight", weight) for index in range(num_ops))
    x = TensorSpec(shape=(width,), dtype="float32")
    return OpGraph(nodes=tuple(nodes), inputs=(("x", x),), outputs=(f"n{num_ops - 1}",), params=params)


def _costs(forward_s, *, ratio=2.0, saved_bytes=0):
    return CostTable(
        ops=tuple(
            OpCost(forward_s=seconds, backward_input_s=seconds * ratio / 2, backward_weight_s=seconds * ratio / 2,
                   saved_bytes=saved_bytes)
            for seconds in forward_s
        )
    )  # fmt: skip


def _even_stages(num_stages, *, forward_s=1.0, backward_s=2.0, **kwargs):
    return tuple(StageCost(forward_s=forward_s, backward_s=backward_s, **kwargs) for _ in range(num_stages))


def _random_graph(seed):
    """A small random graph with integer costs, so that equally good slicings are frequent."""
    rng = random.Random(seed)
    num_ops = rng.randint(4, 9)
    nodes, ops, params = [], [], []
    for index in range(num_ops):
        reads = {f"n{index - 1}"} if index else {"x"}
        reads |= {f"n{rng.randrange(index)}" for _ in range(rng.randint(0, 2)) if index}
        names = (f"p{index}",) if rng.random() < 0.6 else ()
        params += [(name, TensorSpec(shape=(rng.randint(1, 4),), dtype="float32")) for name in names]
        spec = TensorSpec(shape=(rng.randint(1, 3),), dtype="float32", requires_grad=rng.random() < 0.7)
        nodes.append(
            OpNode(index=index, name=f"n{index}", target="op", inputs=tuple(sorted(reads)) + names, outputs=(spec,),
                   params=names, cut_allowed=rng.random() < 0.8)
        )  # fmt: skip
        ops.append(OpCost(forward_s=float(rng.randint(0, 3)), backward_input_s=float(rng.randint(0, 3)),
                          saved_bytes=rng.randint(0, 20)))  # fmt: skip
    x = TensorSpec(shape=(2,), dtype="float32")
    return OpGraph(nodes=tuple(nodes), inputs=(("x", x),), params=tuple(params)), CostTable(ops=tuple(ops))


@pytest.fixture
def machine():
    return _machine


@pytest.fixture
def chain():
    return _chain


@pytest.fixture
def costs():
    return _costs


@pytest.fixture
def even_stages():
    return _even_stages


@pytest.fixture
def random_graph():
    return _random_graph


@pytest.fixture
def golden():
    folder = Path(__file__).parents[1] / "golden"
    return lambda name: (folder / f"{name}.txt").read_text().rstrip("\n")
