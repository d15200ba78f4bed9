"""What a script can still read decides which values outlive a step; they are joined only for a reader."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf
from pfeife_accelerate.capture.readable import readable_values
from pfeife_accelerate.session.call_values import CallValues

pytestmark = pytest.mark.local


class Calls:
    """As far as records need calls."""

    differentiable = True

    def note(self, record):
        pass


def deferred(call, name="logits"):
    leaf = Leaf(resolver=None, call=call, value=name, batch_dim=0, rows_per_item=1)
    return DeferredTensor.leaf(leaf, (4, 3), torch.float32, torch.device("cpu"), True)


def test_a_value_that_only_the_loss_was_made_of_is_not_readable():
    call = Calls()

    def loss_of():
        return deferred(call).square().mean()

    loss = loss_of()
    gc.collect()
    assert readable_values(call, [loss.record]) == frozenset()
    assert readable_values(call, []) == {"logits"}, "a loss that will not be known is read through its values"
    assert readable_values(Calls(), []) == frozenset(), "another call's"


@pytest.mark.parametrize(
    "kept",
    {
        "itself": lambda x: x,
        "detached, in a list": lambda x: [x.detach().float()],
        "a row": lambda x: x[0],
        "what the loss is the mean of": lambda x: {"rows": x.square().sum(1)},
        "changed in place": lambda x: x.clone().add_(1),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_what_a_variable_leads_to_is_readable(kept):
    call = Calls()
    value = deferred(call)
    loss = value.square().mean()
    variable = kept[1](value)
    del value
    assert readable_values(call, [loss.record]) == {"logits"}
    del variable
    gc.collect()
    assert readable_values(call, [loss.record]) == frozenset()


def test_a_real_tensor_that_has_become_a_deferred_one_holds_its_values():
    call = Calls()
    total = torch.zeros(4, 3)
    total += deferred(call)
    gc.collect()
    assert readable_values(call, []) == {"logits"}


def test_parts_are_joined_once_for_the_first_reader():
    joined = []
    values = CallValues()
    values.keep_parts("a", lambda: joined.append(1) or torch.arange(3))
    assert "a" in values and not joined and values.get("b") is None
    assert values["a"] is values["a"] and joined == [1]
    values["a"] = torch.zeros(1)
    assert values["a"].numel() == 1
    with pytest.raises(KeyError, match="b"):
        values["b"]


def test_a_value_that_another_reader_joins_at_this_moment_is_held():
    values, joining, asked = CallValues(), threading.Event(), threading.Event()

    def join():
        joining.set()
        assert not asked.wait(0.2), "a question about the value waits until it is whole"
        return torch.arange(3)

    values.keep_parts("a", join)
    reader = threading.Thread(target=values.get, args=("a",))
    reader.start()
    assert joining.wait(10)
    is_held = "a" in values
    asked.set()
    reader.join(10)
    assert is_held
