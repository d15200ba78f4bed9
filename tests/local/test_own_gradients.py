"""Gradients that other ranks read: of the moment at which the reader's script is, or not at all."""

from __future__ import annotations

from threading import Condition, Timer
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.tensor_server import TensorServer, TooEarly
from pfeife_accelerate.session.own_gradients import OwnGradients

pytestmark = pytest.mark.local


@pytest.fixture
def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2))
    made.grad = torch.ones(2)
    return made


@pytest.fixture
def own(parameter: nn.Parameter) -> OwnGradients:
    unused = nn.Parameter(torch.zeros(3))
    gradients = OwnGradients(SimpleNamespace(placed={"a/b": parameter, "unused": unused}))  # type: ignore[arg-type]
    gradients.note_backward(1)
    return gradients


def test_the_gradient_of_the_last_backward_is_given_also_when_the_script_has_dropped_it(own, parameter):
    parameter.grad = None
    assert own.give("a/b/1/0").tolist() == [1.0, 1.0]
    assert own.give("unused/1/0").tolist() == [0.0, 0.0, 0.0]


def test_a_gradient_that_has_been_changed_more_often_is_refused_unless_a_copy_was_kept(own, parameter):
    parameter.grad.mul_(2)
    assert own.give("a/b/1/1").tolist() == [2.0, 2.0]
    with pytest.raises(PfeifeError, match="PF541 the gradient of 'a/b' was asked for at another moment"):
        own.give("a/b/1/0")
    own.keep_copies()
    parameter.grad.mul_(2)
    assert own.give("a/b/1/1").tolist() == [2.0, 2.0]
    own.note_backward(1)  # somebody reads here: from now on a copy is kept of what a backward leaves
    parameter.grad.mul_(2)
    assert own.give("a/b/2/0").tolist() == [4.0, 4.0]


def test_a_reader_that_is_ahead_waits(own, parameter):
    with pytest.raises(TooEarly):
        own.give("a/b/1/1")
    server = TensorServer(0, Condition())
    server.serve("gradient", own.give, of_one_moment=False)
    Timer(0.2, lambda: parameter.grad.mul_(3)).start()
    assert server.snapshot("gradient", ["a/b/1/1"], 0, 0)[0].tolist() == [3.0, 3.0]


def test_nothing_is_given_to_a_reader_that_is_ahead_when_the_script_has_ended(own):
    server = TensorServer(0, Condition())
    server.serve("gradient", own.give, of_one_moment=False)
    server.stop()
    with pytest.raises(PfeifeError, match="PF410 rank 0 has no such gradient yet"):
        server.snapshot("gradient", ["a/b/1/1"], 0, 0)


def test_a_reader_one_backward_behind_gets_that_ones_gradient_or_an_error(own, parameter):
    parameter.grad = torch.full((2,), 5.0)
    own.forget(call=1)  # the same call runs once more: a slower rank may still read
    assert own.give("a/b/1/0").tolist() == [1.0, 1.0]
    own.note_backward(1)
    assert own.give("a/b/1/0").tolist() == [1.0, 1.0]
    assert own.give("a/b/2/0").tolist() == [5.0, 5.0]
    with pytest.raises(TooEarly):
        own.give("a/b/3/0")
    own.forget(call=2)
    for late in ("a/b/1/0", "a/b/2/0", "unused/2/0"):
        with pytest.raises(PfeifeError, match="PF541"):
            own.give(late)
