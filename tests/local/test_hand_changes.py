"""Parameters that a script changes by hand while a slower rank still reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.session.hand_changes import HandChanges

pytestmark = pytest.mark.local


def set_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.full((2,), 7.0)


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(3)


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def model(parameter: nn.Parameter) -> Any:
    return SimpleNamespace(
        states={"p": parameter, "b": torch.zeros(1)}, placement=SimpleNamespace(placed={"p": parameter})
    )


@pytest.mark.parametrize("change", [set_data, in_place])
def test_a_value_after_a_change_by_hand_is_refused_or_given_from_a_copy(model, parameter, change):
    changes = HandChanges()
    changes.note_moment([model])
    assert changes.value(model, "p") is parameter
    change(parameter)
    with pytest.raises(PfeifeError, match="PF544 'p' was asked for too late"):
        changes.value(model, "p")
    changes.note_moment([model])  # an optimizer's step, a barrier: all ranks are past it
    assert changes.value(model, "p") is parameter
    before = parameter.detach().clone()
    changes.keep_copies([model])
    change(parameter)
    assert torch.equal(changes.value(model, "p"), before)
    assert changes.value(model, "b").shape == (1,)


def test_a_change_that_leaves_no_trace_does_not_reach_a_reader_of_the_moment_before(model, parameter):
    changes = HandChanges()
    changes.note_moment([model])
    changes.keep_copies([model])
    parameter.data.copy_(torch.zeros(2))
    assert changes.value(model, "p").tolist() == [1.0, 1.0]


def test_what_was_changed_before_the_script_read_has_no_copy(model, parameter):
    changes = HandChanges()
    changes.note_moment([model])
    in_place(parameter)
    changes.keep_copies([model])
    with pytest.raises(PfeifeError, match="PF544"):
        changes.value(model, "p")


def test_a_reader_that_is_optimizer_steps_behind_gets_what_was_kept(model, parameter):
    changes = HandChanges()
    changes.note_moment([model])
    changes.keep_copies([model])
    in_place(parameter)
    changes.note_step([model])
    changes.note_step([model])  # nobody has read here
    assert changes.value(model, "p") is parameter
    assert changes.value(model, "p", 2).tolist() == [1.0, 1.0]
    assert [changes.value(model, name, steps) for name, steps in (("p", 1), ("p", 3), ("b", 2))] == [None] * 3
    changes.note_moment([model])  # a schedule: all ranks' scripts are here
    assert changes.value(model, "p", 2) is None
