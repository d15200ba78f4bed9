"""Stages that are run to see what their operations take together, and costs that follow them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.graph import CapturedGraph, bind_symbols
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.trial_stage import trial_stages
from pfeife_accelerate.compat import AUTOCAST_ENTER
from pfeife_accelerate.cost.stage_trial import as_in_stages, stage_seconds
from pfeife_accelerate.ir import CostTable
from pfeife_accelerate.ir.costs import OpCost, TrialStage

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


def captured(model: nn.Module, *args: torch.Tensor) -> tuple[CapturedGraph, dict[Any, int]]:
    call = ModelCapture(model, CPU, ()).call(args, {}, None)
    return call.graph, bind_symbols(call.graph, call.arguments)


def costs(*pairs: tuple[float, float]) -> CostTable:
    return CostTable(ops=tuple(OpCost(forward_s=f, backward_input_s=b / 2, backward_weight_s=b / 2) for f, b in pairs))


def test_costs_of_a_stage_add_up_to_what_it_took_and_others_change_alike():
    table = as_in_stages(costs((1.0, 2.0), (1.0, 4.0), (3.0, 0.0), (5.0, 5.0)), [(slice(0, 2), 3.0, 3.0)])
    assert [op.forward_s for op in table.ops] == [1.5, 1.5, 4.5, 7.5]
    assert [op.backward_s for op in table.ops] == [1.0, 2.0, 0.0, 2.5]
    assert table.ops[1].backward_weight_s == table.ops[1].backward_input_s == 1.0


def test_every_stage_has_a_ratio_of_its_own_and_the_rest_that_of_all():
    found = [(slice(0, 1), 2.0, 0.0), (slice(1, 2), 1.0, 0.0)]
    assert [op.forward_s for op in as_in_stages(costs((1.0, 0.0), (1.0, 0.0), (1.0, 0.0)), found).ops] == [
        2.0,
        1.0,
        1.5,
    ]


def test_without_stages_costs_are_as_they_were():
    assert as_in_stages(costs((1.0, 2.0)), []) == costs((1.0, 2.0))


def test_what_costs_nothing_costs_nothing_in_a_stage():
    assert as_in_stages(costs((0.0, 0.0)), [(slice(0, 1), 1.0, 1.0)]) == costs((0.0, 0.0))


def test_what_has_been_disturbed_counts_four_times_at_most():
    table = as_in_stages(costs((1.0, 8.0)), [(slice(0, 1), 100.0, 1.0)])
    assert (table.ops[0].forward_s, table.ops[0].backward_s) == (4.0, 2.0)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        time.sleep(0.01)
        return value * 1

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.03)
        return gradient


def test_forward_and_backward_are_timed_apart_and_only_parameters_keep_gradients():
    weight, value = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    slow = TrialStage(forward=lambda: [_Slow.apply(weight * value)], values=(value,))
    without = TrialStage(forward=lambda: [], values=())
    times, nothing = stage_seconds([lambda: slow, lambda: without], CPU)
    assert times is not None and nothing is not None
    (forward_s, backward_s), (_, nothing_s) = times, nothing
    assert 0.01 <= forward_s < 0.028 <= backward_s
    assert nothing_s < 0.01
    assert value.grad.tolist() == [1.0, 1.0]
    assert weight.grad[0] > 2.0, "as after several micro-batches"


def test_a_stage_that_fails_is_left_out_and_leaves_no_mode_switched():
    def make() -> TrialStage:
        raise ValueError("cannot be made up")

    def run() -> list[torch.Tensor]:
        torch.set_grad_enabled(False)
        AUTOCAST_ENTER("cpu", torch.bfloat16, True, True)
        raise ValueError("does not like made-up data")

    weight = torch.ones(2, requires_grad=True)
    good = TrialStage(forward=lambda: [weight * 2], values=())
    bad = TrialStage(forward=run, values=())
    dtype = torch.get_autocast_dtype("cpu")
    nothing, times, failed = stage_seconds([make, lambda: good, lambda: bad], CPU)
    assert nothing is None and failed is None and times is not None and times[1] > 0
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is dtype
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


def test_a_stage_that_ends_without_gradients_has_a_backward_each_time():
    weight = torch.ones(2, requires_grad=True)

    def run() -> list[torch.Tensor]:
        root = _Slow.apply(weight * 1)
        torch.set_grad_enabled(False)
        return [root] if root.requires_grad else []

    (times,) = stage_seconds([lambda: TrialStage(forward=run, values=())], CPU)
    assert times is not None and times[1] >= 0.028


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_random_numbers_are_left_as_they_were(mode):
    def make() -> TrialStage:
        weight = torch.randn(2, requires_grad=True)
        return TrialStage(forward=lambda: [weight * torch.randn(2)], values=())

    before = torch.get_rng_state()
    with mode():
        assert stage_seconds([make], CPU) != [None]
    assert torch.equal(torch.get_rng_state(), before)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens, scale):
        value = self.embed(tokens)
        for layer in self.layers:
            value = self.dropout(layer(value).relu()) + value
        return self.norm(value) * scale


@pytest.mark.parametrize("wanted", ["all", "first", "middle", "last"])
def test_any_stage_of_a_model_runs_forward_and_backward_on_made_up_tensors(wanted):
    model = _Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph, bindings = captured(model, torch.randint(0, 11, (6,)), torch.rand(6, 1))
    size = len(graph.ops)
    cuts = [position for position in range(1, size) if graph.cut_allowed[position]]
    low, high = cuts[1], cuts[-1]
    begin, end = {"all": (0, size), "first": (0, low), "middle": (low, high), "last": (high, size)}[wanted]
    (make,) = trial_stages(graph, [slice(begin, end)], bindings, CPU)
    trial = make()
    (times,) = stage_seconds([lambda: trial], CPU)
    assert times is not None and min(times) > 0
    (result, *_) = trial.forward()
    assert result.shape == (6, 8) and result.isfinite().all()
    assert all(value.grad is not None for value in trial.values)
    assert bool(trial.values) == (wanted in ("middle", "last"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} is the script's own"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_numbers_neither_grow_nor_vanish_through_many_layers():
    """What is subnormal is computed many times as slowly, and would be taken for the model's time."""
    model = nn.Sequential(*(part for _ in range(30) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())))
    graph, bindings = captured(model, torch.randn(4, 64))
    (make,) = trial_stages(graph, [slice(0, len(graph.ops))], bindings, CPU)
    (result,) = make().forward()
    assert 1e-3 < result.abs().mean() < 1e3
