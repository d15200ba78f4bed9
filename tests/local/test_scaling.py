"""The check of a scaler for infinite gradients: one decision for all ranks of a pipeline.

What scripts see of it is among the fidelity cases (`scaler_*`), with processes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pfeife_accelerate import session
from pfeife_accelerate.integration import scaling

pytestmark = pytest.mark.local


class Rank:
    """A rank that reduces with another one, of which it is known what that has seen."""

    def __init__(self, parameters: list[torch.nn.Parameter], others: tuple[bool, bool]) -> None:
        self.parameters = parameters
        self.others = torch.tensor(others, dtype=torch.int64)
        self.reductions = 0

    def parameters_counted_here(self) -> dict[int, bool]:
        return {id(parameter): True for parameter in self.parameters}

    def only_own_gradients(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MAX
        self.reductions += 1
        tensor.copy_(torch.maximum(tensor, self.others))


def scaler_of(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> torch.amp.GradScaler:
    """A scaler whose check is hooked as the seam does it."""
    original = torch.amp.GradScaler._unscale_grads_
    hooked = lambda *args: scaling.unscale_gradients(original, *args)  # noqa: E731
    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", hooked)
    return torch.amp.GradScaler(device, init_scale=8.0)


def stepped(scaler: torch.amp.GradScaler, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> bool:
    """Whether the optimizer made its step."""
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    before = parameter.detach().clone()
    scaler.scale(torch.ones((), device=parameter.device))
    parameter.grad = gradient
    counter = SimpleNamespace(calls=0)
    optimizer.register_step_post_hook(lambda *_: setattr(counter, "calls", counter.calls + 1))
    scaler.step(optimizer)
    scaler.update()
    assert (gradient is not None and counter.calls == 1) == bool((parameter != before).any())
    return counter.calls == 1


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_an_overflow_on_any_rank_skips_the_step_and_lowers_the_scale(
    monkeypatch: pytest.MonkeyPatch, own: bool, other: bool
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    rank = Rank([parameter], (True, other))
    monkeypatch.setattr(session, "current", lambda: rank)
    scaler = scaler_of(monkeypatch)
    gradient = torch.full((3,), float("inf") if own else 8.0)
    assert stepped(scaler, parameter, gradient) is not (own or other)
    assert scaler.get_scale() == (4.0 if own or other else 8.0)
    assert rank.reductions == 1


@pytest.mark.parametrize("other", [False, True])
def test_a_rank_without_gradients_goes_along(monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    monkeypatch.setattr(session, "current", lambda: Rank([parameter], (True, other)))
    scaler = scaler_of(monkeypatch)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if other else 8.0)


def test_without_any_gradient_torch_complains_as_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    monkeypatch.setattr(session, "current", lambda: Rank([parameter], (False, False)))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        stepped(scaler_of(monkeypatch), parameter, None)


def test_other_optimizers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank([], (True, True))
    monkeypatch.setattr(session, "current", lambda: rank)
    assert stepped(scaler_of(monkeypatch), torch.nn.Parameter(torch.zeros(3)), torch.ones(3))
    assert rank.reductions == 0


@pytest.mark.gpu
@pytest.mark.parametrize("other", [False, True])
def test_on_a_gpu_with_a_fused_optimizer(monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    monkeypatch.setattr(session, "current", lambda: Rank([parameter], (True, other)))
    scaler = scaler_of(monkeypatch, "cuda")
    optimizer = torch.optim.AdamW([parameter], lr=1.0, fused=True)
    scaler.scale(torch.ones((), device="cuda"))
    parameter.grad = torch.full((3,), 8.0, device="cuda")
    scaler.step(optimizer)
    scaler.update()
    assert bool((parameter != 0).any()) is not other
    assert scaler.get_scale() == (4.0 if other else 8.0)
