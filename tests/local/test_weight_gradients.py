"""Weight gradients that are computed later than those of values: what autograd computes, in two parts."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.split import split
from pfeife_accelerate.cost.op_profile import OpProfile, measure
from pfeife_accelerate.ir.program import InputKind

pytestmark = pytest.mark.local
CPU = torch.device("cpu")
BFLOAT = ("cpu", torch.bfloat16)


class Op(nn.Module):
    """An operation on parameters of these shapes, between two that keep what they are given."""

    def __init__(self, run: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parameters_of_op = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.3) for shape in shapes)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.run(torch.sin(x), *self.parameters_of_op))


#: Shape of the input, and the operation on it.
OPS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "linear": ((6, 5), lambda: Op(F.linear, (4, 5), (4,))),
    "linear of sequences": ((6, 3, 5), lambda: Op(F.linear, (4, 5), (4,))),
    "linear of grids": ((6, 2, 3, 5), lambda: Op(F.linear, (4, 5))),
    "linear of what is not contiguous": ((6, 5, 3), lambda: Op(lambda x, w, b: F.linear(x.mT, w, b), (4, 5), (4,))),
    "linear by names": ((6, 5), lambda: Op(lambda x, w, b: F.linear(x, bias=b, weight=w), (4, 5), (4,))),
    "linear read transposed": ((6, 3, 5), lambda: Op(lambda x, w, b: F.linear(x, w, b).mT, (4, 5), (4,))),
    "linear changed in place": ((6, 5), lambda: Op(lambda x, w, b: F.relu(F.linear(x, w, b), True), (4, 5), (4,))),
    "conv1d": ((6, 3, 8), lambda: Op(lambda x, w, b: F.conv1d(x, w, b, padding="same"), (4, 3, 3), (4,))),
    "conv2d": ((6, 4, 7, 7), lambda: Op(lambda x, w, b: F.conv2d(x, w, b, 2, 1, 1, 2), (6, 2, 3, 3), (6,))),
    "conv2d without bias": ((6, 3, 5, 5), lambda: Op(F.conv2d, (4, 3, 1, 1))),
    "conv3d": ((3, 2, 4, 4, 4), lambda: Op(F.conv3d, (4, 2, 3, 3, 3), (4,))),
    "conv_transpose2d": (
        (6, 3, 5, 5), lambda: Op(lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1), (3, 4, 3, 3), (4,))
    ),
    "matmul": ((6, 3, 5), lambda: Op(lambda x, w: x @ w, (5, 4))),
    "matmul from the left": ((6, 5, 3), lambda: Op(lambda x, w: w.matmul(x), (4, 5))),
    "einsum": ((6, 3, 5), lambda: Op(lambda x, w: torch.einsum("bsi,hio->bsho", x, w), (2, 5, 4))),
    "addmm": ((6, 5), lambda: Op(lambda x, b, w: torch.addmm(b, x, w, beta=0.5), (4,), (5, 4))),
    "baddbmm": ((6, 3, 5), lambda: Op(lambda x, w: torch.baddbmm(x, x, w.expand(len(x), 5, 5)), (5, 5))),
    "bilinear": ((6, 5), lambda: Op(lambda x, w, b: F.bilinear(x, x.cos(), w, b), (4, 5, 5), (4,))),
}  # fmt: skip


class Stage:
    """A model captured as one stage that puts weight gradients off."""

    def __init__(self, model: nn.Module, x: torch.Tensor, autocast: Any = None) -> None:
        torch.compiler.reset()
        self.capture = ModelCapture(model, CPU)
        self.call = self.capture.call((x,), {}, autocast)
        name = self.call.graph.result_names()[-1]
        self.staged = split(self.call.graph, (), (name,), puts_off=True)
        self.autocast = autocast

    def run(self, x: torch.Tensor, later: list[Any] | None) -> torch.Tensor:
        """The result for a batch."""
        sizes = self.staged.sizes({s: len(x) if s in self.call.graph.batch_symbols else v
                                   for s, v in self.call.bindings.items()})  # fmt: skip
        states = self.capture.states()
        values = {InputKind.MODEL_INPUT: lambda _: x, InputKind.STATE: states.__getitem__,
                  InputKind.SIZE: sizes.__getitem__, InputKind.LATER: lambda _: later}  # fmt: skip
        (stage,) = self.staged.stages
        with torch.autocast(*self.autocast) if self.autocast else nullcontext():
            (result,) = stage.run(*(values[kind.kind](kind.name) for kind in stage.inputs))
        return result


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _plain(model: nn.Module, inputs: list[torch.Tensor], autocast: Any) -> dict[str, torch.Tensor | None]:
    for x in inputs:
        with torch.autocast(*autocast) if autocast else nullcontext():
            result = model(x)
        result.backward(torch.ones_like(result) * 0.7)
    return _gradients(model)


@pytest.mark.parametrize("name", OPS)
def test_each_operation_gets_the_gradients_that_autograd_gives(name: str):
    """Bit by bit, over two micro-batches of different size, values and parameters alike."""
    shape, make = OPS[name]
    torch.manual_seed(0)
    model, first = make(), torch.randn(shape)
    stage = Stage(model, first)
    for dtype, autocast in ((None, BFLOAT), (torch.float32, None), (torch.bfloat16, None), (torch.float64, None)):
        model.to(dtype or torch.float32).zero_grad()
        twin = copy.deepcopy(model)
        inputs = [torch.randn(rows, *shape[1:]).to(dtype).requires_grad_() for rows in (shape[0], 2)]
        copies = [x.detach().clone().requires_grad_() for x in inputs]
        expected = _plain(twin, copies, autocast)
        stage.autocast = autocast
        waiting: list[list[Any]] = []
        for x in inputs:
            waiting.append([])
            result = stage.run(x, waiting[-1])
            result.backward(torch.ones_like(result) * 0.7)
        is_put_off = name != "baddbmm"
        assert sum(map(len, waiting)) == 2 * is_put_off, "what was computed from a parameter is not put off"
        assert all((value is None) is is_put_off for value in _gradients(model).values())
        for later in waiting:
            for job in later:
                job()
        # Of a view, autograd sums in another order.
        bounds = {"rtol": 0, "atol": 0} if name != "linear of what is not contiguous" else {}
        torch.testing.assert_close(_gradients(model), expected, **bounds)
        torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in copies], **bounds)
        strides = [value.stride() for value in _gradients(model).values()]
        assert strides == [value.stride() for value in expected.values()]


def test_without_a_list_nothing_is_put_off():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    twin, x = copy.deepcopy(model), torch.randn(4, 5)
    expected = _plain(twin, [x], None)
    result = Stage(model, x).run(x, None)
    result.backward(torch.ones_like(result) * 0.7)
    torch.testing.assert_close(_gradients(model), expected, rtol=0, atol=0)


def _both(model: nn.Module, x: torch.Tensor, put_off: int, autocast: Any = None) -> None:
    """Both halves give what autograd gives, and that many operations were put off."""
    twin = copy.deepcopy(model)
    expected = _plain(twin, [x], autocast)
    later: list[Any] = []
    result = Stage(model, x, autocast).run(x, later)
    result.backward(torch.ones_like(result) * 0.7)
    assert len(later) == put_off
    for job in later:
        job()
    mine = _gradients(model)
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-14) if value is not None else None
        assert (mine[name] is None) == (value is None), name


class Tied(nn.Module):
    """One matrix as a table, as a weight twice, transposed, and in a region that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.table.weight
        y = self.norm(self.table((x > 0).long()) + x[..., None])
        y = torch.tanh(F.linear(torch.tanh(F.linear(y, w)), w)) @ w.mT
        return y + checkpoint(lambda z: torch.tanh(F.linear(z, w)), y, use_reentrant=False)


@pytest.mark.parametrize("autocast", [None, BFLOAT], ids=["plain", "autocast"])
def test_a_parameter_with_many_readers(autocast: Any):
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, 3)
    if autocast is None:
        _both(model.double(), x.double(), 2)
        return
    twin, later = copy.deepcopy(model), []
    expected = _plain(twin, [x], autocast)
    result = Stage(model, x, autocast).run(x, later)
    result.backward(torch.ones_like(result) * 0.7)
    for job in later:
        job()
    # The sum over the readers is rounded in another order.
    for name, value in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value, rtol=1e-2, atol=1e-2)


class Frozen(nn.Module):
    """A weight without a gradient, one with a bias alone, one whose value needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.bias = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.bias.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def test_only_weights_that_want_a_gradient_are_put_off():
    torch.manual_seed(0)
    _both(Frozen().double(), torch.randn(4, 5, dtype=torch.float64), 1)


def test_what_follows_from_parameters_is_not_put_off():
    torch.manual_seed(0)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)).double()
    _both(nn.Sequential(model, nn.Tanh(), nn.Linear(5, 2).double()), torch.randn(4, 5, dtype=torch.float64), 1)


class Mapped(nn.Module):
    """A product under vmap and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.vmap(lambda row: torch.tanh(F.linear(row, self.inner.weight)), in_dims=1, out_dims=1)(x)
        return self.outer(y)


def test_products_under_vmap_are_not_put_off():
    torch.manual_seed(0)
    _both(Mapped().double(), torch.randn(4, 3, 5, dtype=torch.float64), 1)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_a_hook_gets_its_gradient_at_once(kind: str):
    """The script sees it when it would see it without a split, as often."""
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(4, 5), []
    stage = Stage(model, x)
    for hooked in (True, False):
        if hooked:
            handle = getattr(model[2].bias, kind)(lambda g: seen.append(tuple(g.shape)))
        later: list[Any] = []
        result = stage.run(x, later)
        result.sum().backward()
        assert len(later) == (1 if hooked else 2)
        assert (model[2].weight.grad is not None) is hooked
        assert seen == [(3,)]
        model.zero_grad()
        handle.remove()


def test_what_was_kept_is_freed_when_its_gradient_has_been_computed():
    torch.manual_seed(0)
    kept: list[weakref.ref[torch.Tensor]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Conv1d(5, 5, 1)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](torch.tanh(self.layers[0](torch.tanh(x))).mT)

    alive = [0]

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            alive[0] += 1
            kept.append(weakref.ref(tensor))

        def __del__(self) -> None:
            alive[0] -= 1

    model, x, later = Watched(), torch.randn(4, 3, 5), []
    stage = Stage(model, x)
    with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor):
        result = stage.run(x, later)
    before = alive[0]
    result.sum().backward()
    del result
    assert 0 < alive[0] <= before - 2, "the activations of tanh are gone, the products' inputs are not"
    assert len(later) == 2
    while later:
        later.pop()()
    assert alive[0] == 0


def test_the_first_gradient_is_no_copy_and_the_next_is_added_in_place():
    model, x = nn.Linear(5, 3), torch.randn(4, 5)
    stage = Stage(model, x)
    for step in range(2):
        later: list[Any] = []
        stage.run(x, later).sum().backward()
        before = model.weight.grad
        later.pop()()
        assert model.weight.grad is not None and model.weight.grad.grad_fn is None
        assert (model.weight.grad is before) is bool(step)


def test_an_empty_micro_batch_gives_zeros():
    model, x = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Conv1d(5, 3, 1)), torch.randn(4, 5, 5)
    stage, later = Stage(model, x), []
    stage.run(x[:0], later).sum().backward()
    for job in later:
        job()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_costs_say_what_is_put_off():
    """A norm's gradients all come at once, a product's in two parts; one that is computed again is whole."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.product, self.again = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.product(self.norm(x))
            return checkpoint(lambda z: torch.tanh(self.again(z)), y, use_reentrant=False)

    stage = Stage(Mixed(), torch.randn(4, 64))
    ops = measurable_ops(stage.call.graph, stage.call.bindings, CPU)
    profiles = {
        op.key: OpProfile(forward_s=1.0, backward_input_s=2.0, backward_weight_s=3.0,
                          keeps_read=(False,) * len(op.reads), keeps_written=(False,) * len(op.writes))
        for op in ops if op is not None
    }  # fmt: skip
    costs = measure(ops, CPU, profiles=profiles)
    found = [(op.target, c.backward_input_s, c.backward_weight_s) for op, c in zip(ops, costs, strict=True) if op]
    products = [(split_s, weight_s) for target, split_s, weight_s in found if target == "linear"]
    assert products == [(2.0, 3.0), (2.0 + 3.0 + 1.0, 0.0)]
    assert [(i, w) for target, i, w in found if target == "layer_norm"] == [(5.0, 0.0)]
