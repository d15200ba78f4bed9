"""Deferred tensors: a script must not notice them. The oracle is the same script on real tensors."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from pfeife_accelerate.capture.deferred import FAKE_MODE, DeferredTensor, Leaf, is_deferred, resolve, resolve_tree
from pfeife_accelerate.capture.expression import extract
from pfeife_accelerate.capture.loss import split
from pfeife_accelerate.capture.loss_states import Refused
from pfeife_accelerate.compat import FakeTensor
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.integration import seams
from pfeife_accelerate.integration.seams import SeamGroup

pytestmark = pytest.mark.local

B, T, V = 4, 3, 5
LABELS = torch.tensor([[1, 2, 0], [4, -100, 3], [0, 0, 0], [2, 2, -100]])
TARGET = torch.linspace(-1, 1, B * T * V, dtype=torch.float64).view(B, T, V)


class Pipeline:
    """A pipelined call whose values come from a real tensor; backward runs the recorded loss on it, whole batch."""

    def __init__(self, value: torch.Tensor, batch_dim: int | None = 0) -> None:
        self.value = value.detach().requires_grad_(value.is_floating_point())
        self.differentiable = True
        self.reads = 0
        leaf = Leaf(self, self, "logits", batch_dim, 1)
        self.output = DeferredTensor.leaf(
            leaf, tuple(value.shape), value.dtype, value.device, value.is_floating_point()
        )

    def note(self, record: object) -> None:
        pass

    def bring(self, leaf: Leaf) -> None:
        pass

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        self.reads += 1
        return self.value.detach()

    def backward(self, loss: DeferredTensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
        expression = extract(loss)
        leaves = [leaf.resolver.value for leaf in expression.leaf_info]
        with torch.enable_grad():
            scalars = expression.replay(leaves, expression.constants)
        scalars[0].backward(gradient)
        for scalar, (_, record) in zip(scalars, expression.scalars, strict=True):
            record.promise = lambda scalar=scalar: scalar.detach()
        for leaf in expression.leaf_info:
            leaf.call.differentiable = False


def plain(observation: Any) -> Any:
    """What a script has seen, with real tensors for deferred ones; fails on a fake one."""

    def real(item: Any) -> Any:
        if isinstance(item, DeferredTensor):
            item = resolve(item)
        if isinstance(item, torch.Tensor):
            assert not isinstance(item, FakeTensor)
            return item.detach()
        return item

    return torch.utils._pytree.tree_map(real, observation)


def same(left: Any, right: Any) -> None:
    left, right = torch.utils._pytree.tree_leaves(plain(left)), torch.utils._pytree.tree_leaves(plain(right))
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(b, torch.Tensor):
            assert isinstance(a, torch.Tensor) and a.dtype == b.dtype and a.device == b.device
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
        elif isinstance(b, float) and math.isnan(b):
            assert math.isnan(a)
        else:
            assert type(a) is type(b) and np.all(a == b), (a, b)


def logits() -> torch.Tensor:
    return torch.randn(B, T, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def as_model_output(x: torch.Tensor) -> torch.Tensor:
    """What a script gets from a plain model: not a leaf of the autograd graph."""
    return x * 1


def compare(script: Callable[[torch.Tensor], Any]) -> Pipeline:
    """Run a script on a real output and on a deferred one; what it sees, draws and differentiates must be the same."""
    torch.manual_seed(7)
    x = logits().requires_grad_()
    expected = script(as_model_output(x))
    state = torch.get_rng_state()
    torch.manual_seed(7)
    pipeline = Pipeline(logits())
    seen = script(pipeline.output)
    assert torch.equal(torch.get_rng_state(), state)
    same(seen, expected)
    if x.grad is None:
        assert pipeline.value.grad is None
    else:
        assert pipeline.value.grad is not None, "the gradient is lost"
        torch.testing.assert_close(pipeline.value.grad, x.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), state)
    return pipeline


# ---------------------------------------------------------------------------------------------- without computing


def metadata(x):
    y = x.argmax(-1)
    return (
        x.shape,
        x.dtype,
        x.device,
        x.ndim,
        x.size(),
        x.size(0),
        x.size(-1),
        len(x),
        x.dim(),
        x.numel(),
        x.stride(),
        x.requires_grad,
        x.is_leaf,
        x.grad_fn is None,
        x.grad is None,
        x.is_cuda,
        x.layout,
        x.is_contiguous(),
        x.is_floating_point(),
        torch.is_floating_point(x),
        x.element_size(),
        x.itemsize,
        x.nbytes,
        x.get_device(),
        torch.is_tensor(x),
        isinstance(x, torch.Tensor),
        x.T.shape if x.dim() == 2 else None,
        x.mT.shape,
        y.dtype,
        y.requires_grad,
        y.is_leaf,
        y.grad_fn is None,
        x.detach().requires_grad,
        x.mean().shape,
        x.transpose(0, 1).stride(),
        x.type(),
        torch.numel(x),
        x.is_complex(),
        x.is_sparse,
        torch.result_type(x, 1),
        torch.broadcast_shapes(x.shape, (1,)),
        x.is_same_size(x),
        torch.is_complex(x),
        x.retains_grad,
    )


def test_metadata_is_known_without_computing():
    pipeline = Pipeline(logits())
    same(metadata(pipeline.output), metadata(as_model_output(logits().requires_grad_())))
    assert pipeline.reads == 0


RECORDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "indexing": lambda x: (
        x[0],
        x[..., 0],
        x[:, None],
        x[-1, 1:],
        x[[0, 2]],
        x[:, torch.tensor([1, 0])],
        x[x.shape[0] - 1],
    ),
    "bool_mask": lambda x: (
        x[LABELS != -100],
        x[LABELS[:, 0] > 0, 1],
        x[:, :, torch.tensor([True, False, True, False, False])],
    ),
    "iteration": lambda x: [row.sum() for row in x],
    "unpacking": lambda x: (lambda a, b, c, d: a + b * c - d)(*x),
    "reversed": lambda x: next(iter(reversed(x))),
    "split": lambda x: (x.chunk(2), torch.split(x, [1, 3]), x.unbind(1), torch.tensor_split(x, 2)),
    "stack": lambda x: (
        torch.stack([x, TARGET]),
        torch.cat([TARGET, x], 1),
        torch.stack(list(x)),
        torch.hstack([x, TARGET]),
    ),
    "conversions": lambda x: (
        x.to(torch.float32),
        x.float(),
        x.cpu(),
        x.half(),
        x.to("cpu"),
        x.type(torch.float32),
        x.double(),
        x.bfloat16(),
    ),
    "leaving_the_graph": lambda x: (x.detach(), x.data, x.clone(), x.detach().clone(), x.detach().cpu().float()),
    "named_results": lambda x: (x.max(-1).values, x.max(-1)[1], x.topk(2).indices, x.sort(-1).values),
    "integer_division": lambda x: (x.detach() // 1, x.detach() % 2),
    "operators": lambda x: (
        1 - x,
        x / 2,
        2 / x,
        x**2,
        2**x,
        -x,
        abs(x),
        x % 2,
        x @ TARGET[0].T,
        TARGET[0] @ x.mT,
        x > 0,
        x == x,
        ~(x > 0),
        (x > 0) & (x < 1),
    ),
    "from_the_right": lambda x: (
        TARGET - x,
        TARGET * x,
        TARGET / x,
        torch.add(TARGET, x, alpha=2),
        torch.where(x > 0, x, TARGET),
    ),
    "keywords": lambda x: (
        torch.sum(input=x, dim=0),
        F.mse_loss(input=x, target=TARGET),
        F.softmax(x, dim=-1, dtype=torch.float32),
    ),
    "like": lambda x: (
        torch.zeros_like(x),
        torch.ones_like(x, dtype=torch.int),
        x.new_zeros(3),
        x.new_full((2,), 1.5),
        x.new_tensor([1, 2]),
        torch.full_like(x, 3),
        torch.zeros_like(input=x),
    ),
    "random_like": lambda x: (
        torch.rand_like(x),
        torch.randn_like(x),
        torch.randint_like(x, 5),
        torch.randn_like(x.transpose(0, 1)),
    ),
    "broadcast": lambda x: torch.broadcast_tensors(x, torch.zeros(1, dtype=x.dtype)),
    "shape_of_the_other": lambda x: (
        torch.zeros(1).expand_as(x),
        torch.arange(60).view_as(x),
        torch.zeros(2).type_as(x),
        torch.arange(60).reshape_as(x),
        LABELS.to(x),
    ),
    "einsum": lambda x: torch.einsum("btv,btw->vw", x, TARGET),
    "builtin_sum": lambda x: sum([x[0].mean(), x[1].mean(), 1.0]),
    "complex_views": lambda x: (
        torch.fft.rfft(x).conj().real,
        torch.view_as_real(torch.fft.fft(x)),
        x.to_sparse().to_dense(),
    ),
    "functionals": lambda x: (
        F.layer_norm(x, (V,)),
        F.gelu(x),
        F.normalize(x),
        F.pad(x, (1, 1)),
        F.cosine_similarity(x, TARGET, -1),
    ),
    "modules": lambda x: (
        torch.nn.CrossEntropyLoss()(x.view(-1, V), LABELS.view(-1)),
        torch.nn.Softmax(-1)(x),
        torch.nn.Flatten()(x),
    ),
    "eval_dropout": lambda x: F.dropout(x, 0.5, training=False),
    "deterministic_constants": lambda x: (x * torch.arange(V), x + np.float64(2.0), x * True, x + 1j),
    "is_instance_methods": lambda x: (
        torch.atleast_1d(x.mean()),
        x.mean().reshape(1),
        x.mean().unsqueeze(0),
        x.squeeze(),
        x.flatten(1),
    ),
}


@torch.jit.script
def _scripted(x):
    return x.sin() * 2 + 1


@pytest.mark.parametrize("name", RECORDED)
def test_operations_are_recorded_without_computing(name):
    pipeline = Pipeline(logits())
    made = RECORDED[name](pipeline.output)
    assert pipeline.reads == 0
    del made
    compare(RECORDED[name])


@pytest.mark.parametrize(
    "name", [n for n in RECORDED if n not in ("like", "random_like", "shape_of_the_other", "integer_division")]
)
def test_operations_are_differentiated(name):
    def script(x):
        terms = [
            t for t in torch.utils._pytree.tree_leaves(RECORDED[name](x)) if torch.is_tensor(t) and t.requires_grad
        ]
        loss = sum((t.abs().double() if t.is_complex() else t.double()).pow(2).mean() for t in terms)
        loss.backward()
        return loss

    compare(script)


# ---------------------------------------------------------------------------------------------- reading


def reading(x):
    loss = (x - TARGET).square().mean()
    seen = [
        loss.item(),
        float(loss),
        f"{loss:.4f}",
        f"{loss.item():.3f}",
        str(loss.detach()),
        repr(loss.detach()),
        bool(loss > 0),
        loss.tolist(),
        x.tolist(),
        np.asarray(loss.detach()),
        x.detach().numpy(),
        x.detach().cpu().numpy().mean(),
        math.isnan(loss),
        math.isfinite(loss),
        max([x[0, 0, 0], x[0, 0, 1]]),
        min(x[0, 0].detach()),
        int(x.argmax()),
        complex(loss),
        bool(torch.isnan(loss).any()),
        not torch.isfinite(loss),
        torch.equal(x, x),
        torch.allclose(x, x),
        loss in [loss],
        torch.tensor(loss.detach()),
        torch.as_tensor(loss.detach()),
        torch.tensor([loss.item(), 1.0]),
        torch.numel(loss),
        "yes" if loss > 0.1 else "no",
        list(range(x.argmax(-1)[0, 0]))[:1],
        [1, 2, 3, 4, 5, 6][x.argmax(-1)[0, 0]],
        sorted([x[0, 0, 0], x[0, 0, 1], x[0, 0, 2]])[0],
        round(loss.item(), 3),
        loss.detach().cpu().numpy().item(),
        loss.is_nonzero(),
        np.mean([loss.item(), loss.item()]),
        torch.tensor([loss.detach(), loss.detach()]),
        f"{loss:9.3f}",
    ]
    loss.backward()
    return (*seen, loss, loss.item(), x.detach().sum().item())


def test_values_can_be_read_before_backward_and_after():
    compare(reading)


def branches(x):
    loss = F.mse_loss(x, TARGET)
    if torch.isnan(loss) or loss > 1e6:
        return None
    loss = loss * 2 if loss > 0 else loss * 3
    (loss / 4).backward()
    return loss.item(), loss


def test_a_branch_on_a_value_keeps_the_gradient():
    compare(branches)


SHAPES_FROM_DATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "mask_from_the_output": lambda x: x[x > 0],
    "nonzero": lambda x: x[(x > 0).nonzero(as_tuple=True)],
    "masked_select": lambda x: torch.masked_select(x, LABELS[..., None] > 0),
    "masked_select_method": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.argmax(-1).unique(),
    "one_hot": lambda x: F.one_hot(x.argmax(-1)),
    "bincount": lambda x: x.argmax(-1).flatten().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.argmax(-1)[:, 0], dim=0),
    "slice_to_value": lambda x: x[:, : x.argmax(-1)[0, 0] + 1],
    "gather_rows": lambda x: x[torch.arange(B), x[..., 0].argmax(1)],
}


@pytest.mark.parametrize("name", SHAPES_FROM_DATA)
def test_shapes_that_depend_on_data(name):
    def script(x):
        y = SHAPES_FROM_DATA[name](x)
        if y.requires_grad:
            y.square().sum().backward()
        return y, y.shape

    compare(script)


# ---------------------------------------------------------------------------------------------- changes in place


def _add(x, y):
    x += y
    return x


def _set(x, index, value):
    x[index] = value
    return x


def _view_then(change):
    def script(x):
        y = x * 2
        view = y[:, 1:]
        sibling = y[:, 1].unsqueeze(-1)
        before = y * 3
        change(y, view)
        return y, view, sibling, before

    return script


def _rebound_twice(x):
    y = x + 1
    z = y * 2
    y += 1
    w = y * 2
    y.mul_(3)
    return z, w, y


def _view_under_no_grad(x):
    y = x * 2
    v = y[0]
    with torch.no_grad():
        v.clamp_(min=0.1)
        y.mul_(1.5)
    return y, v


def _base_is_gone(x):
    view = (x * 2)[:, 1:]
    view /= 2
    return view


def _accumulated_into_a_detached_loss(x):
    total = x.mean().detach()
    total += x.square().mean()
    return total


INPLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: _add(x * 1, 1),
    "add_deferred": lambda x: _add(x * 1, x),
    "method": lambda x: (x * 2).mul_(TARGET).clamp_(min=-0.5).div_(3),
    "dtype_stays": lambda x: _add(x.float(), TARGET),
    "setitem": lambda x: _set(x * 1, 0, 0.0),
    "setitem_tensor": lambda x: _set(x * 1, (slice(None), 1), TARGET[:, 0] * x[:, 2]),
    "setitem_mask": lambda x: _set(x * 1, LABELS == -100, 0.0),
    "setitem_deferred_mask": lambda x: _set(x * 1, x < 0, 0.0),
    "masked_fill": lambda x: (x * 1).masked_fill_((LABELS == -100)[..., None], -1e4),
    "relu_inplace": lambda x: (lambda y: (F.relu(y, inplace=True), y))(x * 1),
    "relu_inplace_positional": lambda x: (lambda y: (F.leaky_relu(y, 0.1, True), y))(x * 1),
    "relu_module": lambda x: (lambda y: (torch.nn.ReLU(inplace=True)(y), y))(x * 1),
    "relu_underscore": lambda x: (lambda y: (torch.relu_(y), y))(x * 1),
    "earlier_results_keep_the_old_value": _rebound_twice,
    "base_then_view": _view_then(lambda y, view: y.add_(TARGET)),
    "view_then_base": _view_then(lambda y, view: view.mul_(TARGET[:, 1:])),
    "view_operator": _view_then(lambda y, view: _add(view, 1)),
    "both": _view_then(lambda y, view: (view.mul_(2), y.sub_(1), view.add_(y[:, 1:].detach()))),
    "view_of_view": _view_then(lambda y, view: view[..., 0].zero_()),
    "setitem_through_view": _view_then(lambda y, view: _set(view, 0, 5.0)),
    "reshape_view": lambda x: (lambda y: (_add(y.view(-1), 1), y))(x * 1),
    "under_no_grad": _view_under_no_grad,
    "fill": lambda x: (x * 1).fill_(2.0) + x,
    "copy": lambda x: (x * 1).copy_(x.flip(0)),
    "same_object_from_to": lambda x: (lambda y: (_add(y.to(torch.float64), 1), y.contiguous().mul_(2), y))(x * 1),
    "detach_": lambda x: (x * 1).detach_() * x,
    "detached_view": lambda x: (lambda y: (y.detach().mul_(2), y))(x * 1),
    "data": lambda x: (lambda y: (y.data.mul_(2), y))(x * 1),
    "base_is_gone": _base_is_gone,
    "accumulated_into_a_detached_loss": _accumulated_into_a_detached_loss,
    "ior": lambda x: (lambda m: (m.__ior__(x < -1), m))(x > 0),
}


@pytest.mark.parametrize("name", INPLACE)
def test_changes_in_place(name):
    def script(x):
        made = INPLACE[name](x)
        tensors = [t for t in torch.utils._pytree.tree_leaves(made) if torch.is_tensor(t) and t.requires_grad]
        if tensors:
            sum(((i + 2) * t.square()).sum() for i, t in enumerate(tensors)).backward()
        return made

    compare(script)


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t[0],
    lambda t: t[..., 1:],
    lambda t: t.transpose(0, -1),
    lambda t: t.unsqueeze(0),
    lambda t: t.view(-1),
    lambda t: t.detach(),
    lambda t: t.unbind(0)[-1],
    lambda t: t.chunk(2, -1)[0],
    lambda t: t.expand(2, *t.shape)[0],
    lambda t: t.diagonal(),
    lambda t: t.squeeze(),
    lambda t: t[...],
]
CHANGES: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.mul_(1.5),
    lambda t: _add(t, 0.5),
    lambda t: t.sin_(),
    lambda t: t.copy_(t.flip(0) * 2),
    lambda t: _set(t, 0, 0.3),
    lambda t: t.masked_fill_(t.detach() > 0.5, 0.1),
    lambda t: t.add_(t.detach().mean()),
    lambda t: without_grad_mul(t),
    lambda t: F.relu(t, inplace=True),
]


@torch.no_grad()
def without_grad_mul(t):
    t.mul_(0.7)


@pytest.mark.parametrize("seed", range(100))
def test_random_views_and_changes(seed):
    """Plain torch refuses some (one of several views, a value that backward needs); what it takes must be the same."""

    def script(x):
        rng = random.Random(seed)
        tensors = [x * 1]
        for _ in range(rng.randint(2, 9)):
            target = rng.choice(tensors)
            try:
                match rng.randint(0, 3):
                    case 0:
                        tensors.append(rng.choice(VIEWS)(target))
                    case 1:
                        rng.choice(CHANGES)(target)
                    case 2:
                        tensors.append(target * 1.1)
                    case 3:
                        _add(target, rng.choice(tensors))
            except (RuntimeError, IndexError) as error:
                raise Unsupported from error
        loss = sum((i + 1) * t.square().sum() for i, t in enumerate(tensors))
        try:
            loss.backward()
        except RuntimeError as error:
            raise Unsupported from error
        return tensors

    try:
        plain(script(as_model_output(logits().requires_grad_())))
    except (Unsupported, RuntimeError):
        return
    try:
        compare(script)
    except PfeifeError as error:
        assert "detach" in str(error)


class Unsupported(Exception):
    pass


def into_real(x):
    loss = torch.zeros((), dtype=torch.float64)
    same_object = loss
    loss += F.mse_loss(x, TARGET)
    loss += 1
    buffer = torch.zeros(B, V, dtype=torch.float64)
    buffer[:, 0] = x[:, 0, 0]
    buffer.add_(x[:, 1])
    total = loss + buffer.square().sum()
    total.backward()
    return loss, buffer, same_object


def test_a_real_tensor_takes_up_a_gradient_in_place():
    compare(into_real)


def into_real_without_gradient(x):
    total, counts = torch.zeros(()), torch.zeros(V, dtype=torch.long)
    loss = F.mse_loss(x, TARGET)
    total += loss.detach().float()
    counts.scatter_add_(0, x.argmax(-1).flatten(), torch.ones(B * T, dtype=torch.long))
    storage = np.zeros((B, T))
    storage[:] = x.detach()[..., 0]
    real = type(total)
    loss.backward()
    return total, counts, storage, real.__name__, type(counts).__name__


def test_a_real_tensor_is_changed_for_real_where_no_gradient_flows():
    compare(into_real_without_gradient)


def test_a_part_of_a_real_tensor_cannot_take_up_a_gradient():
    buffer = torch.zeros(B, V, dtype=torch.float64)
    row = buffer[0]
    with pytest.raises(PfeifeError, match=r"PF501(.|\n)*torch\.stack"):
        row += Pipeline(logits()).output[0, 0]
    assert type(buffer) is torch.Tensor and not buffer.any()


def test_a_trainable_leaf_cannot_be_changed_as_in_plain_torch():
    weight = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight += Pipeline(logits()).output[0, 0]


def test_a_constant_may_be_changed_after_its_use_if_it_is_small():
    def script(x):
        weight = torch.tensor(2.0, dtype=torch.float64)
        loss = x.mean() + weight
        weight += 1
        loss.backward()
        return loss, weight

    compare(script)


@pytest.mark.parametrize("read", [True, False])
def test_a_large_constant_changed_after_its_use_is_an_error(read):
    pipeline, target = Pipeline(logits().repeat(1, 1, 9)), torch.zeros(B, T, 9 * V, dtype=torch.float64)
    loss = F.mse_loss(pipeline.output, target)
    target.fill_(3)
    with pytest.raises(PfeifeError, match=r"PF521(.|\n)*test_deferred.py:\d+(.|\n)*clone"):
        loss.item() if read else loss.backward()


# ---------------------------------------------------------------------------------------------- random numbers

RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_module": lambda x: torch.nn.Dropout(0.3)(x),
    "dropout_inplace": lambda x: (lambda y: (F.dropout(y, 0.3, True, True), y))(x * 1),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "multinomial": lambda x: torch.multinomial(x[:, 0].softmax(-1), 2),
    "normal_": lambda x: (x * 1).normal_() + x,
    "noise": lambda x: x + torch.randn_like(x) * torch.rand(()),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_those_of_the_script(name):
    def script(x):
        first, second = RANDOM[name](x), RANDOM[name](x)
        after = torch.rand(2)
        seen = plain((first, second))  # read twice: the same numbers
        tensors = [t for t in torch.utils._pytree.tree_leaves((first, second)) if t.requires_grad]
        if tensors:
            sum(t.square().sum() for t in tensors).backward()
        return seen, first, second, after

    compare(script)


def test_batch_norm_outside_the_model_updates_its_statistics_once():
    def script(x):
        norm = torch.nn.BatchNorm1d(T, affine=False, dtype=torch.float64)
        loss = norm(x).square().mean() + norm(x * 2).pow(3).mean()
        loss.backward()
        return loss, norm.running_mean, norm.running_var, norm.num_batches_tracked

    compare(script)


# ---------------------------------------------------------------------------------------------- what cannot be recorded


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Identity(Reverse):
    @staticmethod
    def forward(ctx, x):
        return x


class Round(Reverse):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 2).round()


@pytest.mark.parametrize("function", [Reverse, Identity, Round])
@pytest.mark.parametrize("use", [lambda y: y.mean(), lambda y: y.mean().backward(), lambda y: y * 2])
def test_a_custom_backward_is_refused_not_lost(function, use):
    with pytest.raises(PfeifeError, match=rf"PF522(.|\n)*{function.__name__}(.|\n)*test_deferred.py"):
        use(function.apply(Pipeline(logits()).output))


def test_what_backward_cannot_do_is_refused():
    for how in ({"create_graph": True}, {"inputs": [torch.ones(1)]}):
        with pytest.raises(PfeifeError, match=r"PF502 backward\(create_graph=True\)(.|\n)*test_deferred.py"):
            Pipeline(logits()).output.mean().backward(**how)


@pytest.mark.parametrize(
    "use", [lambda a, out: (a * out).sum(-1), lambda a, out: (a + 0j).conj().mul(out).abs().sum(-1)]
)
def test_a_function_given_outputs_as_arguments_and_from_outside_is_refused(use):
    out = Pipeline(logits()).output
    with pytest.raises(PfeifeError, match=r"PF523 a function was given the outputs(.|\n)*test_deferred.py"):
        F.triplet_margin_with_distance_loss(out, TARGET, -TARGET, distance_function=lambda a, b: use(a - b, out))


@pytest.fixture
def recorded_functions():
    """The seam that lets custom functions be recorded."""
    seams.install(SeamGroup.TORCH)
    yield
    seams.uninstall(SeamGroup.TORCH)


class Scaled(torch.autograd.Function):
    """Two outputs of which the second has no gradient, an argument that is no tensor, a tensor without a gradient."""

    @staticmethod
    def forward(ctx, x, factor, weight, *, _=None):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        worst = x.argmax(-1)
        ctx.mark_non_differentiable(worst)
        return (x * factor * weight).round(), worst

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        x, weight = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False, weight.requires_grad)
        return gradient * ctx.factor * weight, None, (gradient * x).sum() * 0.5 if weight.requires_grad else None


class OnNumpy(Reverse):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.sin(x.numpy()))


def two_results(x):
    y, worst = Scaled.apply(x, 3.0, torch.tensor(0.5, dtype=torch.float64))
    loss = (y * TARGET).mean() + (y.sum(-1) * (worst == 1)).sum()
    loss.backward()
    return loss, worst, y.requires_grad, worst.requires_grad


def reversed_and_read(x):
    y = Reverse.apply(x)
    loss = y.square().mean()
    value = loss.item()
    loss.backward()
    return value, loss


def without_gradient(x):
    with torch.no_grad():
        hard = Round.apply(x)
    loss = (x * hard * Round.apply(x.detach())).mean()
    loss.backward()
    return loss, hard


CUSTOM = {
    "two_results": two_results,
    "reversed_and_read": reversed_and_read,
    "without_gradient": without_gradient,
    "identity": lambda x: Identity.apply(x * 2).exp().mean().backward(),
    "numpy_inside": lambda x: OnNumpy.apply(x.sum(-1)).mean().backward(),
    "of_itself": lambda x: Round.apply(Reverse.apply(x) * TARGET).mean().backward(),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_function_is_recorded_with_its_backward(name, recorded_functions):
    compare(CUSTOM[name])


def test_a_custom_function_with_a_trainable_tensor(recorded_functions):
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    compare(lambda x: Scaled.apply(x, 3.0, weight)[0].mean().backward())
    assert weight.grad is not None


def test_a_custom_function_takes_the_exact_order_under_its_own_name(recorded_functions):
    expression = extract(Round.apply(Pipeline(logits()).output).mean())
    with pytest.raises(Refused, match=r"Round, a torch\.autograd\.Function") as refusal:
        split(expression, FAKE_MODE, B)
    assert "test_deferred.py:" in refusal.value.where


def test_a_custom_function_on_real_tensors_goes_its_normal_way(recorded_functions):
    x = logits().requires_grad_()
    Round.apply(x).sum().backward()
    same(x.grad, -torch.ones_like(x))
    assert Round.apply(x).grad_fn.name() == "RoundBackward"


def test_a_custom_function_that_changes_its_argument_is_refused(recorded_functions):
    class Change(Reverse):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

    with pytest.raises(PfeifeError, match=r"PF501(.|\n)*Change"):
        Change.apply(Pipeline(logits()).output * 1)


def test_reentrant_checkpoint_is_refused(recorded_functions):
    with pytest.raises(PfeifeError, match="PF522"):
        checkpoint(lambda y: y.square(), Pipeline(logits()).output, use_reentrant=True).mean()


def test_the_model_output_inside_a_transform_is_refused():
    x = Pipeline(logits()).output
    with pytest.raises(PfeifeError, match=r"PF540(.|\n)*test_deferred.py"):
        torch.func.grad(lambda z: (z * x).sum())(torch.ones(B, T, V, dtype=torch.float64))
    with pytest.raises(PfeifeError, match=r"PF522(.|\n)*vmap"):
        torch.vmap(lambda row: row.sum())(x).mean()


def test_a_custom_function_can_be_read_and_used_without_gradient():
    y = Round.apply(Pipeline(logits()).output)
    same(y, (logits() * 2).round())
    with torch.no_grad():
        same(Round.apply(Pipeline(logits()).output) + 1, (logits() * 2).round() + 1)


def test_a_scripted_function_is_refused_where_a_gradient_would_be_lost():
    with pytest.raises(PfeifeError, match="PF522"):
        for _ in range(3):
            _scripted(Pipeline(logits()).output).mean().backward()
    with torch.no_grad():
        same(_scripted(Pipeline(logits()).output), _scripted(logits()))


def test_a_transform_is_refused_where_a_gradient_would_be_lost():
    doubled = torch.vmap(lambda row: row * 2)(Pipeline(logits()).output)
    same(doubled, logits() * 2)
    with pytest.raises(PfeifeError, match="PF522"):
        doubled.mean()


def test_checkpoint_without_reentry_is_recorded_and_with_it_refused():
    compare(lambda x: checkpoint(lambda y: y.square().mean(), x, use_reentrant=False).backward())
    with pytest.raises(PfeifeError, match="PF522"):
        checkpoint(lambda y: y.square(), Pipeline(logits()).output, use_reentrant=True).mean()


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "register_hook": lambda x: x.register_hook(print),
    "retain_grad": lambda x: x.retain_grad(),
    "autograd_grad": lambda x: torch.autograd.grad(x.mean(), x),
    "create_graph": lambda x: x.mean().backward(create_graph=True),
    "inputs": lambda x: x.mean().backward(inputs=[x]),
    "gradient_of_intermediate": lambda x: x.detach().requires_grad_(),
    "requires_grad_property": lambda x: setattr(x.detach(), "requires_grad", True),
    "resize": lambda x: x.resize_(3),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "set_data": lambda x: setattr(x, "data", torch.zeros(1)),
    "out": lambda x: torch.add(TARGET, 1, out=x),
    "gradient_through_detach": lambda x: (lambda y: (y.detach().add_(x), y))(x * 1),
    "detach_with_views": lambda x: (lambda y: (y[0], y.detach_()))(x * 1),
    "foreach": lambda x: torch._foreach_add_([x], [x]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_with_the_line(name):
    with pytest.raises(PfeifeError, match=r"test_deferred\.py:\d+"):
        REFUSED[name](Pipeline(logits()).output)


ERRORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + torch.zeros(7, dtype=x.dtype),
    "matmul": lambda x: x @ torch.zeros(7, 7, dtype=x.dtype),
    "view": lambda x: x.view(7, 7),
    "index": lambda x: x[9],
    "too_many_indices": lambda x: x[0, 0, 0, 0],
    "dim": lambda x: x.sum(5),
    "cat": lambda x: torch.cat([x, torch.zeros(2, 2, dtype=x.dtype)]),
    "cross_entropy": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1)[:3]),
    "argument": lambda x: x.sum(nonsense=1),
    "attribute": lambda x: x.nonsense,
    "unpack": lambda x: (lambda a, b: a)(*x),
    "iterate_scalar": lambda x: list(x.mean()),
    "item_of_many": lambda x: x.item(),
    "bool_of_many": lambda x: bool(x),
    "inplace_shape": lambda x: _add(x[0] * 1, x),
    "inplace_dtype": lambda x: _add(x.argmax(-1), 0.5),
    "backward_of_many": lambda x: x.backward(),
    "backward_of_integers": lambda x: x.argmax().backward(),
    "requires_grad": lambda x: x.requires_grad_(False),
    "out_with_gradient": lambda x: torch.add(x, 1, out=torch.zeros(B, T, V, dtype=x.dtype)),
    "len_of_scalar": lambda x: len(x.mean()),
    "mse_dtype": lambda x: F.nll_loss(x.view(-1, V), torch.zeros(B * T)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_raise_what_plain_torch_raises(name):
    with pytest.raises(Exception) as expected:
        ERRORS[name](as_model_output(logits().requires_grad_()))
    with pytest.raises(type(expected.value)) as raised:
        ERRORS[name](Pipeline(logits()).output)
    assert type(raised.value) is type(expected.value)
    assert "Fake" not in str(raised.value)


# ---------------------------------------------------------------------------------------------- containers and copies


def test_model_outputs_hold_deferred_tensors():
    def script(x):
        output = CausalLMOutputWithPast(loss=x.square().mean(), logits=x, hidden_states=(x * 2, x * 3))
        output.loss.backward()
        return (
            output["logits"],
            output[0],
            output.to_tuple(),
            dict(output)["loss"],
            [k for k in output],
            output.keys().__len__(),
        )

    compare(script)


def test_copies_and_files_hold_real_values():
    def script(x):
        file = io.BytesIO()
        torch.save({"x": x.detach(), "loss": x.mean().detach()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        copies = copy.deepcopy({"x": x.detach()}), copy.copy(x.detach()), pickle.loads(pickle.dumps(x.detach()))
        return loaded, copies, [type(t).__name__ for t in torch.utils._pytree.tree_leaves((loaded, copies))]

    compare(script)


def test_tensors_are_keys_by_identity():
    x = Pipeline(logits()).output
    y = x * 1
    table = {x: 1, y: 2}
    x += 1
    assert table[x] == 1 and table[y] == 2 and hash(x) == hash(x)


@dataclass
class Output:
    logits: Any
    rest: list


def test_resolve_tree_goes_through_containers():
    x = Pipeline(logits()).output
    tree = resolve_tree({"a": [x, (x.mean(), 3)], "b": slice(0, x.argmax())})
    same(tree["a"], [logits(), (logits().mean(), 3)])
    assert not is_deferred(tree["b"].stop)


# ---------------------------------------------------------------------------------------------- steps


def test_values_of_earlier_steps_are_real_and_hold_no_expression():
    total, python_total, losses, expected, calls = torch.zeros(()), 0.0, [], 0.0, []
    for _ in range(50):
        pipeline = Pipeline(logits())
        calls.append(weakref.ref(pipeline))
        loss = F.mse_loss(pipeline.output, TARGET)
        python_total = python_total * 0.9 + loss.detach()
        total += loss.detach().float()
        losses.append(loss.detach())
        loss.backward()
        expected = expected * 0.9 + F.mse_loss(logits(), TARGET).item()
    assert python_total.item() == pytest.approx(expected)
    assert torch.stack(losses).mean().item() == pytest.approx(F.mse_loss(logits(), TARGET).item())
    del losses, loss, pipeline
    gc.collect()
    assert sum(call() is not None for call in calls) <= 1, "an accumulated value keeps every step's expression"


def test_a_chain_of_thousands_of_operations_is_resolved():
    x = Pipeline(logits()).output
    y = x.mean()
    for _ in range(3000):
        y = y + 1
    assert y.item() == pytest.approx(logits().mean().item() + 3000)


def test_what_is_recorded_does_not_depend_on_what_was_read():
    def loss(read: bool) -> Any:
        x = Pipeline(logits()).output
        scale = x.detach().abs().max()
        if read:
            scale.item(), x.tolist()
        weight = scale * 2
        if read:
            print(weight)
        return extract((x / weight).square().mean())

    assert loss(True).signature == loss(False).signature
    assert len(loss(True).scalars) == len(loss(False).scalars)


def test_a_loss_of_one_step_weighted_by_another_takes_it_as_a_constant():
    def expression(read: bool) -> Any:
        first, second = Pipeline(logits()), Pipeline(logits() + 1)
        previous = first.output.square().mean()
        previous.backward()
        if read:
            previous.item()
        return extract(second.output.mean() * previous.detach() + 0.1 * previous.detach())

    assert expression(True).signature == expression(False).signature
    assert len(expression(False).leaves) == 1


def test_two_calls_in_one_loss():
    query, passage = Pipeline(logits()), Pipeline(logits() * 2)
    loss = (query.output * passage.output).mean()
    loss.backward()
    a, b = logits().requires_grad_(), (logits() * 2).requires_grad_()
    (a * b).mean().backward()
    same((query.value.grad, passage.value.grad, loss), (a.grad, b.grad, (a * b).mean()))


def test_autograd_backward_of_several_losses():
    def script(x):
        torch.autograd.backward([x.mean(), x.square().sum()], [None, torch.tensor(2.0, dtype=x.dtype)])

    compare(script)
    compare(lambda x: torch.autograd.backward(x.mean()))
    compare(lambda x: x.mean(0).backward(torch.ones(T, V, dtype=x.dtype)))


def test_autocast_and_gradient_modes_are_those_of_the_recording():
    def script(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x.float() @ TARGET[0].float().T
            with torch.autocast("cpu", enabled=False):
                z = x.float() @ TARGET[0].float().T
        with torch.no_grad():
            w = x.exp()
        with torch.inference_mode():
            u = x.argmax(-1)
            read = x.mean().item()
        loss = (z * 2).mean() + (w * x).mean() + y.float().mean()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss.item()
        loss.backward()
        return y.dtype, y.requires_grad, z, w.requires_grad, u, read, value

    compare(script)


def test_a_backward_in_vain_is_an_error():
    x = Pipeline(logits())
    x.output.mean().backward()
    y = torch.zeros_like(x.output, requires_grad=True)
    assert not is_deferred(y)


def test_nothing_fake_is_kept_in_what_the_script_holds():
    x = Pipeline(logits()).output
    holder = vars(x)
    assert not any(isinstance(value, FakeTensor) for value in holder.values())
    for value in (x.grad_fn, x.mean().grad_fn.next_functions, x.data_ptr() if False else None, x.max(-1)):
        assert not isinstance(value, FakeTensor)
