"""Which optimizers treat each parameter by itself, as found out by stepping a small twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn
from transformers.optimization import Adafactor

from pfeife_accelerate.session.optimizer_trial import mixes_parameters

pytestmark = pytest.mark.local


class ClippedSGD(torch.optim.SGD):
    """Limits the norm of all gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Trusting(torch.optim.Optimizer):
    """A trust ratio for each parameter, and an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count[0] += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.add_(momentum, alpha=-self.param_groups[0]["lr"] * float(p.norm() / momentum.norm()))


class Noisy(torch.optim.SGD):
    """Adds noise."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.add_(torch.randn_like(p.grad))
        return super().step(closure)


BY_ITSELF: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": torch.optim.AdamW,
    "trust ratio": Trusting,
    "noise": lambda p: Noisy(p, lr=0.1),
    "transformers Adafactor": lambda p: Adafactor(p, lr=1e-3, relative_step=False),
    "timm Lion": timm.optim.Lion,
    "timm AdamP": timm.optim.AdamP,
    "timm Lars": lambda p: timm.optim.Lars(p, lr=0.1),
    "timm NvNovoGrad": timm.optim.NvNovoGrad,
    "timm Muon": timm.optim.Muon,
    "timm Lookahead": lambda p: timm.optim.Lookahead(torch.optim.AdamW(p)),
    "timm Lamb without a limit": lambda p: timm.optim.Lamb(p, max_grad_norm=None),
}
OVER_ALL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "a limit of the norm": lambda p: ClippedSGD(p, lr=0.1),
    "timm Lamb": timm.optim.Lamb,
    "timm Lookahead of Lamb": lambda p: timm.optim.Lookahead(timm.optim.Lamb(p)),
}


def _judge(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 2))
    parameters = list(model.parameters())
    optimizer = make([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.1}])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # a warm-up: the first rate is none
    model(torch.randn(3, 6)).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in parameters]
    state, random = dict(optimizer.state), torch.get_rng_state()
    verdict = mixes_parameters(optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert dict(optimizer.state) == state
    assert all(torch.equal(p, q) and torch.equal(p.grad, g) for p, (q, g) in zip(parameters, before, strict=True))
    assert getattr(optimizer, "count", [0]) == [0]
    return verdict


@pytest.mark.parametrize("name", BY_ITSELF)
def test_an_optimizer_that_treats_each_parameter_by_itself_is_recognised(name):
    assert not _judge(BY_ITSELF[name])


@pytest.mark.parametrize("name", OVER_ALL)
def test_an_optimizer_that_adds_up_over_all_parameters_is_recognised(name):
    assert _judge(OVER_ALL[name])
