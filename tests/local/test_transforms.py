"""Models that run `torch.vmap` and its kin: what these show a function has no memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.measurable import NotMeasurable, measurable_ops
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.nodes import target_name
from pfeife_accelerate.capture.split import split
from pfeife_accelerate.cost import device_spec, measure
from pfeife_accelerate.ir import CostOrigin

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


class Mapped(nn.Module):
    """A function mapped over places (`dim=1`) or rows (`dim=0`), between two layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.last, self.dim = nn.Linear(8, 8), nn.Linear(8, 8), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.vmap(lambda h: torch.sin(h) * h.sum(-1, keepdim=True), in_dims=self.dim, out_dims=self.dim)(
            self.first(x)
        )
        return self.last(y)


class Gradient(nn.Module):
    """The gradient of a function, as a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.func.grad(lambda h: torch.sin(h).square().sum())(self.layer(x)))


class Mixing(nn.Module):
    """A function mapped over what is made of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.sin)(self.layer(x).mean(0))


def inside(graph) -> list[int]:
    """Positions of what begins, runs under and ends a transform."""
    names = [target_name(node) for node in graph.ops]
    return list(range(names.index("_vmap_increment_nesting"), names.index("_vmap_decrement_nesting") + 1))


def test_a_mapped_function_is_one_piece():
    graph = ModelCapture(Mapped(1), CPU).call((torch.randn(4, 3, 8),), {}, None).graph
    within = inside(graph)
    assert graph.refusal is None and len(within) > 3
    assert not any(graph.cut_allowed[i] for i in within[1:])
    assert graph.cut_allowed[within[0]] and graph.cut_allowed[within[-1] + 1]


def test_all_that_a_transform_does_is_kept():
    x = torch.randn(4, 8)
    model = Gradient()
    call = ModelCapture(model, CPU).call((x,), {}, None)
    states = {p.node: model.state_dict()[p.state_name] for p in call.graph.placeholders if p.state_name}
    given = [states.get(p.node, call.arguments[p.index]) for p in call.graph.placeholders]
    torch.testing.assert_close(call.graph.gm(*given)[0], model(x))
    (stage,) = split(call.graph, (), call.graph.result_names()).stages
    assert {node.name for node in call.graph.transformed} <= {node.name for node in stage.run.__self__.graph.nodes}


def test_rows_that_a_function_is_mapped_over_are_not_divided():
    for model in (Mapped(0), Mixing()):
        graph = ModelCapture(model, CPU).call((torch.randn(4, 3, 8),), {}, None).graph
        assert graph.refusal is not None
        assert graph.tail == frozenset()
    assert "a transformed function (torch.vmap or its kin)" in graph.refusal


def test_what_runs_mapped_is_modelled():
    call = ModelCapture(Mapped(1), CPU).call((torch.randn(4, 3, 8),), {}, None)
    ops = measurable_ops(call.graph, call.bindings, CPU)
    costs = measure(ops, CPU, spec=device_spec(CPU), repeats=1)
    found = {op.target: (op, cost) for op, cost in zip(ops, costs, strict=True) if op is not None}
    sine, cost = found["sin"]
    for target, message in (("sin", "its results exist under"), ("_remove_batch_dim", "it reads what exists under")):
        with pytest.raises(NotMeasurable, match=message + r" torch\.vmap or its kin alone"):
            found[target][0].prepare()
    assert cost.origin is CostOrigin.MODELLED and cost.forward_s > 0
    assert sine.reads[0].spec.shape == (4, 3, 8)
    assert found["linear"][1].origin is CostOrigin.MEASURED
