"""Models with graph breaks: captured in pieces, joined to one graph that computes what the model computes."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.failure import CaptureFailure
from pfeife_accelerate.capture.graph import PlaceholderKind
from pfeife_accelerate.capture.model_capture import ModelCapture

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

CPU = torch.device("cpu")


class Net(nn.Module):
    """A residual model that calls something in its middle; a weight is used on both sides of it."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.between = between

    def forward(self, x, labels=None):
        y = torch.tanh(self.first(x))
        y = self.last(self.between(y)) + x
        return y if labels is None else (nn.functional.mse_loss(y, labels), y)


class Looped(nn.Module):
    """Breaks in a loop: Dynamo leaves the function with the loop alone, and captures what it calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Net(broken) for _ in range(3))

    def forward(self, x):
        scale = x.abs().mean(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x) / scale.sqrt()
        return x


def broken(h):
    torch._dynamo.graph_break()
    return h * 2


def prints(h):
    print("in the model")
    return h


def logs(h):
    logging.getLogger("model").info("in the model")
    return h + 1


def thrice(h):
    torch._dynamo.graph_break()
    h = h + 1
    print("in the model")
    h = h * h
    torch._dynamo.graph_break()
    return h


@torch._dynamo.disable
def helper(h):
    parts = h.chunk(2, dim=-1)
    mask = (h.detach() > 0).to(h.dtype)
    return torch.cat([parts[1], -parts[0]], -1) * mask + h.T.T + torch.arange(8.0)


def keeps_rows(h):
    rows = h.shape[0]
    torch._dynamo.graph_break()
    return h.reshape(rows * 2, -1).reshape(rows, -1)


@torch._dynamo.disable
def makes_rows(h):
    return h.T.mul(torch.ones(h.shape[0])).T


@torch._dynamo.disable
def names_rows(h):
    return h.reshape(h.shape[0] * 2, -1).reshape(h.shape[0], -1)


def computed(model, capture, call, *index):
    """The joined graph's outputs with the model's real parameters."""
    states = capture.states()
    arguments = [
        states[p.state_name] if p.kind is PlaceholderKind.STATE else call.arguments[p.index]
        for p in call.graph.placeholders
    ]
    return call.graph.gm(*arguments)


def check(model, rows=(6, 6, 3, 5, 1), kwargs=lambda x: {}):
    """Capture calls of several sizes, compare outputs and gradients with the model's own, and return the captures."""
    plain, capture, calls = copy.deepcopy(model), ModelCapture(model, CPU), []
    for number in rows:
        x = torch.randn(number, 8)
        call = capture.call((x,), kwargs(x), None)
        found = call.outputs_with(computed(model, capture, call).__getitem__)
        wanted = plain(x, **kwargs(x))
        torch.testing.assert_close(found, wanted)
        loss = lambda out: (out[0] if isinstance(out, tuple) else out).square().sum()  # noqa: E731
        torch.testing.assert_close(
            torch.autograd.grad(loss(found), list(model.parameters())),
            torch.autograd.grad(loss(wanted), list(plain.parameters())),
        )
        calls.append(call)
    return calls


@pytest.mark.parametrize("between", [broken, prints, logs, thrice, helper], ids=lambda f: getattr(f, "__name__", "f"))
def test_pieces_are_joined_and_the_batch_stays_open(between):
    calls = check(Net(between))
    assert all(call.graph.refusal is None and call.graph.batch_symbols for call in calls[:-1])
    assert len({id(call.graph) for call in calls[:-1]}) == 1, "sizes of a batch are no variants"


def test_breaks_in_a_loop_and_in_submodules():
    calls = check(Looped())
    assert calls[0].graph.refusal is None
    assert len({id(call.graph) for call in calls[:-1]}) == 1


def test_a_loss_inside_the_model_after_a_break_is_replayed_with_the_scripts():
    calls = check(Net(broken), kwargs=lambda x: {"labels": x.sin()})
    assert calls[0].graph.tail and calls[0].graph.refusal is None


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (keeps_rows, "a size of the batch passes through Python"),
        (names_rows, "depends on the number of rows"),
        (makes_rows, "depends on the number of rows"),
    ],
)
def test_a_batch_size_that_python_has_read_makes_the_batch_indivisible_and_not_wrong(between, why):
    for call in check(Net(between), rows=(6, 4, 5)):
        assert call.graph.refusal is not None
    assert why in check(Net(between), rows=(6,))[0].graph.refusal


def branches(h):
    return h * 2 if h.sum() > 0 else h


def reads(h):
    return h * h.mean().item()


@torch._dynamo.disable
def changes(h):
    h = h * 1
    h += 1
    return h


@torch._dynamo.disable
def without_gradient(h):
    with torch.no_grad():
        return h * 2


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


@torch._dynamo.disable
def custom(h):
    return _Custom.apply(h)


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (branches, "it reads the value of a tensor"),
        (reads, "it reads the value of a tensor"),
        (changes, "changes a tensor in place outside the captured graphs"),
        (without_gradient, "gradients switched on or off"),
        (custom, "gradients switched on or off"),
    ],
)
def test_what_cannot_be_joined_says_so_and_leaves_no_trace(between, why):
    model = Net(between)
    before = {name: id(value) for name, value in vars(model).items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(CaptureFailure) as failure:
        ModelCapture(model, CPU).call((torch.ones(4, 8),), {}, None)
    assert failure.value.refusal.id == "PF510"
    assert why in str(failure.value)
    assert "test_stitch.py" in str(failure.value)
    assert {name: id(value) for name, value in vars(model).items()} == before
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    torch.testing.assert_close(torch.rand(2), expected)


class Counting(nn.Module):
    """Keeps a list, a count, a hidden state and a buffer, then reads a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(8))
        self.calls, self.seen, self.hidden = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        h = self.layer(x)
        self.hidden = h
        self.last = h[0].detach()
        print("in the model")
        return h if h.sum() > 0 else -h


def test_a_failed_capture_takes_back_what_the_models_python_did():
    model = Counting()
    buffer = model.last
    with pytest.raises(CaptureFailure):
        ModelCapture(model, CPU).call((torch.ones(4, 8),), {}, None)
    assert (model.calls, model.seen, model.hidden) == (0, [], None)
    assert model.last is buffer


class Averaging(nn.Module):
    """Assigns a new tensor to a buffer: an assignment on fakes must not be lost silently."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        h = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * h.mean(0).detach()
        return h - self.average


def test_a_buffer_that_is_assigned_anew_is_no_capture():
    with pytest.raises(CaptureFailure, match="the forward pass assigns a new tensor to average"):
        ModelCapture(Averaging(), CPU).call((torch.ones(4, 8),), {}, None)


def test_more_variants_than_the_limit_are_forgotten_and_said_once(monkeypatch, caplog):
    # Dynamo would run the model uncaptured, on fakes, once a function has that many variants.
    import pfeife_accelerate.capture.model_capture as module

    class Flags(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, *, mode):
            return self.layer(x).sin() if mode == "a" else self.layer(x).cos() * len(mode)

    monkeypatch.setattr(module, "MAX_VARIANTS", 3)
    model = Flags()
    capture = ModelCapture(model, CPU)
    x = torch.randn(4, 8)
    for mode in ("a", "bb", "ccc", "dddd", "eeeee", "a", "bb", "ffffff", "ggggggg"):
        call = capture.call((x,), {"mode": mode}, None)
        torch.testing.assert_close(call.outputs_with(computed(model, capture, call).__getitem__), model(x, mode=mode))
    assert caplog.text.count("has been captured in more than 3 variants") == 1
