"""Weight gradients that are added within the product: what autograd gives, without memory for each micro-batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.split import split
from pfeife_accelerate.compat import storage_id
from pfeife_accelerate.ir.program import InputKind

pytestmark = pytest.mark.local
CPU = torch.device("cpu")
WIDE, NARROW = 192, 128  # a weight that is worth it


class Stage:
    """A model captured as one stage, and the model itself."""

    def __init__(self, model: nn.Module, x: torch.Tensor, *, puts_off: bool = False) -> None:
        torch.compiler.reset()
        self.model, self.twin = model, copy.deepcopy(model)
        capture = ModelCapture(model, CPU)
        self.call = capture.call((x,), {}, None)
        (self.program,) = split(self.call.graph, (), (self.call.graph.result_names()[-1],), puts_off=puts_off).stages
        self.states = capture.states()

    def run(self, x: torch.Tensor, later: list[Any] | None = None) -> torch.Tensor:
        """The stage's result."""
        values = {InputKind.MODEL_INPUT: lambda _: x, InputKind.STATE: self.states.__getitem__,
                  InputKind.LATER: lambda _: later}  # fmt: skip
        (result,) = self.program.run(*(values[wanted.kind](wanted.name) for wanted in self.program.inputs))
        return result


class Made(TorchDispatchMode):
    """Notes the shapes of all tensors that operations make in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {storage_id(argument) for argument in args if isinstance(argument, torch.Tensor)}
        if isinstance(result, torch.Tensor) and storage_id(result) not in read:
            self.shapes.append(tuple(result.shape))
        return result


class Tied(nn.Module):
    """One matrix as a table and as two layers' weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NARROW, NARROW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.table.weight
        return F.linear(torch.tanh(F.linear(torch.tanh(x + self.table((x > 0).long()[:, 0])), w)), w)


class Again(nn.Module):
    """Layers in a region that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.second(torch.tanh(self.first(y))), torch.tanh(x), use_reentrant=False)


MODELS = {
    "with a bias": lambda: nn.Sequential(nn.Linear(NARROW, WIDE), nn.Tanh(), nn.Linear(WIDE, NARROW)),
    "without": lambda: nn.Sequential(nn.Linear(NARROW, WIDE, bias=False), nn.Tanh()),
    "a frozen bias": lambda: _frozen(nn.Linear(NARROW, WIDE), "bias"),
    "a frozen weight": lambda: nn.Sequential(nn.Linear(NARROW, WIDE), _frozen(nn.Linear(WIDE, NARROW), "weight")),
    "read twice": Tied,
    "computed again": Again,
    "too small": lambda: nn.Linear(NARROW, 2),
}


def _frozen(layer: nn.Linear, name: str) -> nn.Linear:
    layer.get_parameter(name).requires_grad_(False)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_autograds(name: str, dtype: torch.dtype):
    """Over micro-batches of different size: the first bit by bit, sums as rounding allows, of values bit by bit."""
    torch.manual_seed(0)
    stage = Stage(MODELS[name]().to(dtype), torch.randn(6, NARROW, dtype=dtype))
    bound = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2}[dtype]
    for number, rows in enumerate((6, 2, 3)):
        x = torch.randn(rows, NARROW, dtype=dtype)
        mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = stage.run(mine), stage.twin(plain)
        assert torch.equal(result, expected)
        (result * 0.3).sum().backward()
        (expected * 0.3).sum().backward()
        assert torch.equal(mine.grad, plain.grad)
        for (key, p), q in zip(stage.model.named_parameters(), stage.twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            if q.grad is not None:
                scale = q.grad.abs().max().item()
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0 if number == 0 else bound * scale, msg=key)
                assert p.grad.stride() == q.grad.stride()


@pytest.mark.parametrize("shape", [(2, 7, NARROW), (2, 3, 5, NARROW), (NARROW,)], ids=str)
def test_values_of_any_rank(shape: tuple[int, ...]):
    torch.manual_seed(0)
    x = torch.randn(shape)
    stage = Stage(nn.Linear(NARROW, WIDE), x)
    for _ in range(2):
        stage.run(x).square().sum().backward()
        stage.twin(x).square().sum().backward()
    torch.testing.assert_close(stage.model.weight.grad, stage.twin.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stage.model.bias.grad, stage.twin.bias.grad)


@pytest.mark.parametrize("puts_off", [False, True], ids=["at once", "put off"])
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
def test_from_the_second_micro_batch_on_no_gradient_is_made(puts_off: bool, bias: bool):
    x = torch.randn(4, NARROW)
    stage = Stage(nn.Linear(NARROW, WIDE, bias=bias), x, puts_off=puts_off)
    found = []
    for _ in range(3):
        before, later = stage.model.weight.grad, []
        result = stage.run(x, later)
        with Made() as made:
            result.sum().backward()
            for job in later:
                job()
        assert len(later) == puts_off
        assert before is None or stage.model.weight.grad is before, "it is added to in place"
        found.append((WIDE, NARROW) in made.shapes)
    assert found == [True, False, False]


def test_no_gradient_is_made_in_a_region_that_is_computed_again_either():
    x = torch.randn(4, NARROW)
    stage, found = Stage(Again(), x), []
    for _ in range(2):
        result = stage.run(x)
        with Made() as made:
            result.sum().backward()
        found.append((WIDE, NARROW) in made.shapes or (NARROW, WIDE) in made.shapes)
    assert found == [True, False]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_sees_each_gradient(kind: str):
    x, seen = torch.randn(4, NARROW), []
    stage = Stage(nn.Linear(NARROW, WIDE), x)
    getattr(stage.model.weight, kind)(lambda given: seen.append(tuple(given.shape)))
    for _ in range(2):
        stage.run(x).sum().backward()
    assert seen == [(WIDE, NARROW)] * 2


def test_a_gradient_that_nobody_asks_for_is_not_added():
    x = torch.randn(4, NARROW, requires_grad=True)
    stage = Stage(nn.Linear(NARROW, WIDE), x)
    weight = stage.model.weight
    stage.run(x).sum().backward()
    total = weight.grad.clone()
    result = stage.run(x)
    torch.autograd.backward([result.sum()], inputs=[x], retain_graph=True)
    assert torch.equal(weight.grad, total)
    (wanted,) = torch.autograd.grad(result.sum(), [weight])
    torch.testing.assert_close(wanted, total)
    assert torch.equal(weight.grad, total)


TOTAL = torch.zeros(WIDE, NARROW)


@pytest.mark.parametrize(
    "total", [TOTAL.double(), TOTAL.t().contiguous().t(), TOTAL.to_sparse()], ids=["double", "transposed", "sparse"]
)
def test_a_gradient_that_the_script_has_put_there(total: torch.Tensor):
    """As autograd adds to it, or refuses to."""
    x = torch.randn(4, NARROW)
    stage = Stage(nn.Linear(NARROW, WIDE), x)
    outcomes = []
    for run, weight in ((stage.run, stage.model.weight), (stage.twin, stage.twin.weight)):
        if total.dtype != weight.dtype:
            weight.grad_dtype = None
        weight.grad = total.clone()
        run(x).sum().backward()
        outcomes.append(weight.grad)
    torch.testing.assert_close(outcomes[0], outcomes[1])
    assert outcomes[0].dtype == outcomes[1].dtype and outcomes[0].layout == outcomes[1].layout


def test_what_is_measured_is_what_runs():
    x = torch.randn(4, NARROW)
    call = Stage(nn.Sequential(nn.Linear(NARROW, WIDE), nn.Tanh()), x).call
    linear = next(op for op in measurable_ops(call.graph, call.bindings, CPU) if op is not None)
    prepared = linear.prepare()
    weight = next(t for t in prepared.reads if t.shape == (WIDE, NARROW))
    weight.grad = torch.zeros_like(weight)
    with linear.context():
        result = prepared.run()
    with Made() as made:
        result.sum().backward()
    assert (WIDE, NARROW) not in made.shapes
    assert weight.grad.any()
