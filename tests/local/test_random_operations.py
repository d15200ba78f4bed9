"""Random operations of a captured graph: found, numbered, the same whatever the cut, the order and the repetition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfeife_accelerate import compat
from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.model_capture import CapturedCall, ModelCapture
from pfeife_accelerate.capture.nodes import target_name
from pfeife_accelerate.capture.split import split
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.program import InputKind
from pfeife_accelerate.session.randomness import return_seed, take_seed

pytestmark = pytest.mark.local
CPU = torch.device("cpu")


class Function(nn.Module):
    """A function of one tensor as a model; the parameter lets gradients be wanted."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


def _attention(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], *args, **kwargs)[:, 0]


class Halved(torch.autograd.Function):
    """A function with its own backward that draws in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Plain(torch.autograd.Function):
    """A function with its own backward that draws nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@torch.library.custom_op("random_operations_test::noise", mutates_args=())
def _noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


_noise.register_fake(torch.empty_like)

RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 2, 0.5, True, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, p=0.5, training=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, train=True),
    "attention, by position": lambda x: _attention(x, None, 0.5),
    "attention, by name": lambda x: _attention(x, dropout_p=0.5),
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x * x.new_empty(x.shape).bernoulli_(0.5),
    "rand": lambda x: x + torch.rand(x.shape[0], 3, 1),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "randint": lambda x: x + torch.randint(0, 9, x.shape),
    "randperm": lambda x: x[:, torch.randperm(3)],
    "multinomial": lambda x: x + torch.multinomial(torch.softmax(x, -1)[:, 0], 1)[:, :, None],
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(),
    "normal": lambda x: torch.normal(x.detach(), 1.0) + x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "a custom function": lambda x: Halved.apply(x),
    "another library's operator": lambda x: x + torch.ops.random_operations_test.noise(x),
}
NOT_RANDOM = {
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, False),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True),
    "torch.dropout in evaluation": lambda x: torch.dropout(x, 0.5, train=False),
    "attention": _attention,
    "attention, none by name": lambda x: _attention(x, dropout_p=0.0),
    "rrelu in evaluation": lambda x: F.rrelu(x, training=False),
    "a custom function": lambda x: Plain.apply(x),
    "normalise": lambda x: F.normalize(F.layer_norm(x, (4,))),
}


def _capture(function: Any, x: torch.Tensor) -> tuple[Function, CapturedCall]:
    torch.compiler.reset()
    model = Function(function)
    return model, ModelCapture(model, CPU).call((x,), {}, None)


def _run(call: CapturedCall, states: dict[str, Any], x: torch.Tensor, seed: int, cuts: tuple[int, ...] = ()) -> Any:
    """The graph's result, stage by stage, for one micro-batch."""
    graph = call.graph
    name = graph.result_names()[-1]
    staged = split(graph, cuts, (name,))
    sizes, values = staged.sizes(call.bindings), {}
    for stage in staged.stages:
        source = {InputKind.STATE: states, InputKind.SIZE: sizes, InputKind.VALUE: values}
        arguments = [
            seed if i.kind is InputKind.SEED else x if i.kind is InputKind.MODEL_INPUT else source[i.kind][i.name]
            for i in stage.inputs
        ]
        values.update(zip(stage.outputs, stage.run(*arguments), strict=True))
    return values[name]


def _cuts(graph: CapturedGraph) -> list[int]:
    return [position for position, allowed in enumerate(graph.cut_allowed) if allowed]


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_operation_repeats_for_its_seed_alone_and_leaves_the_generators(name: str):
    x = torch.linspace(0.5, 1.5, 48).reshape(4, 3, 4)
    model, call = _capture(RANDOM[name], x)
    assert len(call.graph.random_number) >= 1
    states = dict(model.named_parameters())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = _run(call, states, x, 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)  # what the script draws in between makes no difference
    torch.testing.assert_close(_run(call, states, x, 7), first, rtol=0, atol=0)
    assert any(not torch.equal(_run(call, states, x, seed), first) for seed in (8, 9, 10))
    for cut in _cuts(call.graph):
        torch.testing.assert_close(_run(call, states, x, 7, (cut,)), first, rtol=0, atol=0)


@pytest.mark.parametrize("name", NOT_RANDOM)
def test_what_draws_nothing_is_not_numbered(name: str):
    _, call = _capture(NOT_RANDOM[name], torch.randn(4, 3, 4))
    assert not call.graph.random_number


def test_the_attention_module_is_found():
    torch.compiler.reset()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    graph = ModelCapture(layer, CPU).call((torch.randn(4, 3, 8),), {}, None).graph
    found = [target_name(node) for node in graph.random_number]
    assert found == ["multi_head_attention_forward", "dropout", "dropout", "dropout"]
    torch.compiler.reset()
    graph = ModelCapture(layer.eval(), CPU).call((torch.randn(4, 3, 8),), {}, None).graph
    assert not graph.random_number


def test_operations_draw_independently_and_have_the_same_numbers_for_other_lengths():
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.dropout(x, 0.5), F.dropout(x, 0.5)], 1)

    torch.compiler.reset()
    model = Function(twice)
    capture = ModelCapture(model, CPU)
    calls = [capture.call((torch.ones(4, length),), {}, None) for length in (64, 96, 80)]
    assert calls[0].graph is not calls[1].graph
    results = [
        _run(call, dict(model.named_parameters()), torch.ones(4, length), 5)
        for call, length in zip(calls, (64, 96, 80), strict=True)
    ]
    assert not torch.equal(results[0][:, 0], results[0][:, 1])
    flat = [[result[:, i].flatten()[:256] for i in (0, 1)] for result in results]
    for i in (0, 1):  # the masks are drawn in memory order, from the same seeds
        torch.testing.assert_close(flat[1][i], flat[0][i], rtol=0, atol=0)
        torch.testing.assert_close(flat[2][i], flat[0][i], rtol=0, atol=0)


def test_a_failing_operation_leaves_the_generators():
    x = torch.rand(4, 3, 4)
    model, call = _capture(lambda x: x * torch.bernoulli(x.detach()), x)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="p_in"):
        _run(call, dict(model.named_parameters()), x + 2, 7)
    assert torch.equal(torch.get_rng_state(), before)


# ----------------------------------------------------------------------------------------------------------------------
# Seeds of calls
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawn", [0, 1, 7, 623, 624, 625, 2000])
def test_taking_a_seed_changes_nothing_that_the_script_draws(drawn: int):
    for seed in (0, 11, 2**40 + 5, -3):
        torch.manual_seed(seed)
        torch.rand(drawn)
        state = torch.get_rng_state()
        wanted = [torch.rand(1500), torch.randn(33), torch.randint(0, 2**40, (700,))]
        torch.set_rng_state(state)
        taken = [take_seed() for _ in range(100)]
        assert len(set(taken)) == 100
        for one in wanted:
            like = {torch.float32: torch.rand if one.numel() == 1500 else torch.randn}.get(one.dtype)
            found = torch.randint(0, 2**40, (700,)) if like is None else like(one.numel())
            assert torch.equal(found, one)
        assert torch.initial_seed() == seed % 2**64


def test_a_state_goes_with_the_number_of_calls_made_in_it():
    torch.manual_seed(5)
    first = [take_seed() for _ in range(3)]
    torch.manual_seed(5)
    assert take_seed() == first[0]
    state = torch.get_rng_state()
    student = take_seed()
    torch.set_rng_state(state)
    assert take_seed() == student == first[1]
    with torch.random.fork_rng():
        assert take_seed() == first[2]
        take_seed()
    assert take_seed() == first[2]
    return_seed()
    assert take_seed() == first[2]
    torch.rand(1)
    assert take_seed() not in first


def test_seeds_follow_torch_alone():
    np.random.seed(1)
    torch.manual_seed(5)
    first = take_seed()
    np.random.seed(2)
    torch.manual_seed(5)
    assert take_seed() == first
    torch.manual_seed(6)
    assert take_seed() != first


def test_an_unknown_form_of_the_state_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "_STATE_BYTES", 16)
    with pytest.raises(PfeifeError, match="PF450 the CPU generator's state has 5056 bytes, not 16"):
        take_seed()
