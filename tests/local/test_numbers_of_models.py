"""Numbers in a model's Python that differ between models of one class, or between calls of one model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.nodes import target_name

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


class Scaled(nn.Module):
    def __init__(self, scale: float, width: int = 4) -> None:
        super().__init__()
        self.scale = scale
        self.layer = nn.Linear(width, width)
        self.drop = nn.Dropout(scale)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        y = self.layer(x) * self.scale * factor * math.sqrt(factor)
        return self.drop(y) if self.scale > 0.3 else y


def operations(call) -> list[str]:
    """What it computes; each operation can be measured."""
    found = measurable_ops(call.graph, call.bindings, CPU)
    for op in found:
        if op is not None:
            op.prepare().run()
    return [op.target for op in found if op is not None]


def test_models_of_one_class_with_other_numbers_are_captured_alike():
    expected = ["linear", "mul", "mul", "mul"]
    for scale in (0.5, 0.25, 0.4, 0.2):
        call = ModelCapture(Scaled(scale), CPU).call((torch.randn(3, 4),), {}, None)
        assert operations(call) == expected + ["dropout"] * (scale > 0.3)


def test_models_of_one_class_with_other_widths_have_sizes_that_are_numbers():
    for width in (4, 6, 8):
        call = ModelCapture(Scaled(0.25, width), CPU).call((torch.randn(3, width),), {}, None)
        sizes = [p.example.shape for p in call.graph.placeholders if p.kind.value == "state"]
        assert sizes == [(width, width), (width,)]
        assert list(call.bindings.values()) == [3]


def test_a_number_that_changes_from_call_to_call():
    model = Scaled(0.25)
    capture = ModelCapture(model, CPU)
    for scale, factor in ((0.25, 1.0), (0.25, 1.5), (0.125, 1.5), (0.5, 2.0)):
        model.scale = scale
        call = capture.call((torch.randn(3, 4),), {"factor": factor}, None)
        assert operations(call)[:4] == ["linear", "mul", "mul", "mul"]
        factors = [node.args[1] for node in call.graph.ops if target_name(node) == "mul"]
        assert factors == [scale, factor, math.sqrt(factor)]
