"""Recorded expressions: what is taken out of deferred tensors, its replay, and when two steps are alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf
from pfeife_accelerate.capture.expression import Expression, Origin, extract

pytestmark = pytest.mark.local

B, V = 4, 5


class Call:
    differentiable = True

    def note(self, record: object) -> None:
        pass

    def bring(self, leaf: Leaf) -> None:
        pass

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        return torch.linspace(0, 1, B * V).view(B, V)


def output(name: str = "logits", call: Call | None = None, **changes: Any) -> DeferredTensor:
    call = call or Call()
    settings = {"shape": (B, V), "dtype": torch.float32, "batch_dim": 0, "rows": 1, **changes}
    leaf = Leaf(call, call, name, settings["batch_dim"], settings["rows"])  # type: ignore[arg-type]
    return DeferredTensor.leaf(leaf, settings["shape"], settings["dtype"], torch.device("cpu"), True)


def of(loss: Callable[[DeferredTensor], Any], **changes: Any) -> Expression:
    return extract(loss(output(**changes)))


def test_leaves_constants_and_steps_are_found_once():
    target = torch.randn(B, V * 20)[:, :V].repeat(1, 20)
    x = output(shape=(B, 20 * V))
    difference = x - target
    expression = extract((difference * difference).mean() + F.mse_loss(x, target))
    assert len(expression.leaves) == 1 and len(expression.constants) == 1
    assert [step.operation.func.__name__ for step in expression.steps] == ["sub", "mul", "mean", "mse_loss", "add"]
    assert expression.root.origin is Origin.STEP and expression.root.index == 4
    assert len(expression.scalars) == 3


def test_two_tensors_of_one_leaf_are_one_leaf():
    call = Call()
    leaf = Leaf(call, call, "logits", 0, 1)  # type: ignore[arg-type]
    a, b = (DeferredTensor.leaf(leaf, (B, V), torch.float32, torch.device("cpu"), True) for _ in range(2))
    assert len(extract((a * b).mean()).leaves) == 1


def test_replay_gives_values_and_gradients():
    weight = torch.rand(V)
    expression = of(lambda x: (F.softmax(x, -1) * weight).sum(-1).square().mean() / 3)
    x = torch.randn(B, V, requires_grad=True)
    values = expression.replay([x], expression.constants)
    expected = (F.softmax(x, -1) * weight).sum(-1).square().mean() / 3
    torch.testing.assert_close(values[0], expected)
    actual, wanted = (torch.autograd.grad(v, x, retain_graph=True)[0] for v in (values[0], expected))
    torch.testing.assert_close(actual, wanted)
    assert [v.shape for v in values] == [record.fake.shape for _, record in expression.scalars]


def test_replay_tells_each_step_before_it_runs():
    told: list[tuple[str, str]] = []
    expression = of(lambda x: x.exp().mean())
    expression.replay([torch.zeros(B, V)], (), lambda name, where: told.append((name, where)))
    assert [name for name, _ in told] == ["exp", "mean"]
    assert all("test_expression.py:" in where for _, where in told)


def test_a_value_changed_in_place_is_what_it_was_when_it_was_used():
    def loss(x):
        y = x + 1
        first = y.sum()
        y *= 2
        return first + y.sum()

    expression = of(loss)
    x = torch.randn(B, V)
    torch.testing.assert_close(expression.replay([x], expression.constants)[0], loss(x))


SAME = {
    "values_of_constants": lambda x, n: (x * torch.full((V,), float(n))).mean(),
    "names_of_locals": lambda x, n: [y := x * 2, y.sum()][-1],
    "keywords": lambda x, n: F.cross_entropy(x, torch.full((B,), n), label_smoothing=0.1),
    "slices": lambda x, n: x[:, 1:3, None].sum(),
    "in_place": lambda x, n: (x * 1).mul_(2).sum(),
    "set_item": lambda x, n: x.clone().index_fill(1, torch.tensor([n]), 0.0).sum(),
    "nan": lambda x, n: x.nan_to_num(float("nan")).sum(),
}


@pytest.mark.parametrize("name", SAME)
def test_steps_that_do_the_same_have_equal_signatures(name):
    first, second = of(lambda x: SAME[name](x, 1)), of(lambda x: SAME[name](x, 2))
    assert first.signature == second.signature
    assert hash(first.signature) == hash(second.signature)


DIFFERENT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "number": (lambda x: (x * 2).sum(), lambda x: (x * 3).sum()),
    "int_and_float": (lambda x: (x > 1).sum() * 1, lambda x: (x > 1).sum() * 1.0),
    "int_and_bool": (lambda x: x[1].sum(), lambda x: x[True].sum()),
    "sign_of_zero": (lambda x: x.clamp(max=0.0).sum(), lambda x: x.clamp(max=-0.0).sum()),
    "function": (lambda x: x.sin().sum(), lambda x: x.cos().sum()),
    "changing_function": (lambda x: (x * 1).sin_().sum(), lambda x: (x * 1).cos_().sum()),
    "inner_function_of_views": (lambda x: x[:, :2].sum(), lambda x: x[:, :3].sum()),
    "order": (lambda x: (x - torch.ones(V)).sum(), lambda x: (torch.ones(V) - x).sum()),
    "shape_of_constant": (lambda x: (x * torch.ones(V)).sum(), lambda x: (x * torch.ones(1)).sum()),
    "dtype_of_constant": (lambda x: (x * torch.ones(V)).sum(), lambda x: (x * torch.ones(V).double()).sum()),
    "trainable_constant": (lambda x: (x * torch.ones(V)).sum(), lambda x: (x * torch.ones(V).requires_grad_()).sum()),
    "no_grad": (lambda x: (x * x.detach()).sum(), lambda x: (x * without_grad(x)).sum()),
    "grad_mode": (lambda x: (x * (x * 2)).sum(), lambda x: (x * without_grad(x)).sum()),
    "autocast": (lambda x: x.mm(x.T).float().sum(), lambda x: with_autocast(x)),
    "keyword": (lambda x: x.sum(0).mean(), lambda x: x.sum(dim=0, keepdim=True).mean()),
    "string": (lambda x: F.mse_loss(x, x * 2, reduction="sum"), lambda x: F.mse_loss(x, x * 2, reduction="mean")),
    "shared": (lambda x: [y := x.exp(), (y * y).sum()][-1], lambda x: (x.exp() * x.exp()).sum()),
    "output_index": (lambda x: x.max(-1)[0].sum(), lambda x: x.topk(1).values.sum()),
}


@torch.no_grad()
def without_grad(x):
    return x * 2


def with_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x.mm(x.T).float().sum()


@pytest.mark.parametrize("use", [lambda x, a: (x * a).sum(), lambda x, a: a - x.mean(), lambda x, a: a / (x + a).sum()])
def test_factors_and_terms_are_not_part_of_the_signature(use):
    first, second = of(lambda x: use(x, 0.5)), of(lambda x: use(x, 0.25))
    assert first.signature == second.signature
    assert set(first.numbers) == {0.5} and set(second.numbers) == {0.25}
    x = torch.rand(4, 5)
    assert torch.equal(first.replay([x], first.constants)[0], use(x, 0.5))
    assert torch.equal(first.replay([x], first.constants, numbers=second.numbers)[0], use(x, 0.25))


@pytest.mark.parametrize("name", DIFFERENT)
def test_steps_that_differ_have_different_signatures(name):
    first, second = DIFFERENT[name]
    assert of(first).signature != of(second).signature


@pytest.mark.parametrize("change", [{"shape": (B, V + 1)}, {"dtype": torch.float64}, {"batch_dim": 1}, {"rows": 2}])
def test_outputs_that_differ_have_different_signatures(change):
    assert of(lambda x: x.sum()).signature != of(lambda x: x.sum(), **change).signature


def test_an_argument_of_which_nothing_is_known_is_like_no_other():
    class Strange:
        def __index__(self):
            return 1

    first, second = (of(lambda x: x.select(0, Strange()).sum()) for _ in range(2))
    assert first.signature != second.signature


def test_steps_that_draw_random_numbers_are_alike():
    assert (
        of(lambda x: torch.bernoulli(x.sigmoid()).sum()).signature
        == of(lambda x: torch.bernoulli(x.sigmoid()).sum()).signature
    )


def test_long_expressions_are_extracted_in_linear_time():
    def seconds(length: int) -> float:
        x = output()
        y = x.sum()
        for i in range(length):
            y = y + torch.tensor(float(i))
        start_s = time.process_time()
        assert len(extract(y).constants) == length
        return time.process_time() - start_s

    seconds(50)
    short, long = min(seconds(200) for _ in range(3)), min(seconds(1600) for _ in range(3))
    assert long < 24 * short  # eight times as long; quadratic would be sixty-four


def test_recording_and_extracting_are_cheap():
    """The limits are an order of magnitude above what an idle core needs: they catch a lost cache, not noise."""
    x, target = output(), torch.randn(B, V)

    def loss():
        y = x
        for _ in range(9):
            y = y * target
        return y.mean()

    loss()
    start_s = time.process_time()
    losses = [loss() for _ in range(20)]
    recording_s = (time.process_time() - start_s) / 200
    start_s = time.process_time()
    for made in losses:
        extract(made)
    extracting_s = (time.process_time() - start_s) / 20
    assert recording_s < 1e-3
    assert extracting_s < 3e-3
