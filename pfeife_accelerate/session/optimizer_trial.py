"""Whether an optimizer's step for one parameter depends on the gradients of others, tried out on small parameters.

Models: what a rank of a pipeline does to an optimizer: it sees some of the gradients, and none of the others. A twin
with small parameters is stepped with all gradients, and with every second one alone; where each parameter is treated by
itself, that makes no difference.
Ignores: torch's own optimizers, which are known; one inside another, which is tried instead of the outer one; what an
optimizer does only after many steps.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch

_STEPS = 3
_TOLERANCE = 1e-3
_RATE = 0.01
_MAX_SIDE = 4


def mixes_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the parameters' new values depend on which others have a gradient.

    Raises: whatever the optimizer raises if it cannot be stepped so.
    """
    inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    if inner:
        return any(mixes_parameters(one) for one in inner)
    if type(optimizer).__module__.startswith("torch.optim."):
        return False
    devices = {p.device for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        whole, again = _trained(optimizer, (0, 1), seed=1), _trained(optimizer, (0, 1), seed=2)
        if not _same(whole, again, (0, 1)):
            return False  # it draws numbers, and nothing can be told
        return not all(_same(whole, _trained(optimizer, (part,), seed=1), (part,)) for part in (0, 1))


def _trained(optimizer: torch.optim.Optimizer, parts: tuple[int, ...], *, seed: int) -> list[torch.Tensor]:
    """Small parameters after some steps of a twin in which those of `parts` have gradients: the even, the odd ones."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(0)
    small = [_small(p, generator) for p in given]
    twin = _twin(optimizer, given, small)
    for _ in range(_STEPS):
        for number, parameter in enumerate(small):
            size = 10 ** (4 * torch.rand((), generator=generator) - 2)  # sums over all change from step to step
            gradient = (size * torch.randn(parameter.shape, generator=generator)).to(parameter)
            parameter.grad = gradient if number % 2 in parts else None
        torch.manual_seed(seed)
        type(twin).step(twin)
    return [parameter.detach() for parameter in small]


def _small(parameter: torch.Tensor, generator: torch.Generator) -> torch.nn.Parameter:
    shape = [min(side, _MAX_SIDE) for side in parameter.shape]
    value = torch.randn(shape, generator=generator)
    return torch.nn.Parameter(value.to(parameter.device, parameter.dtype))


def _twin(
    optimizer: torch.optim.Optimizer, given: list[torch.Tensor], small: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer for other parameters, without state, and with a rate (a warm-up begins with none)."""
    memo: dict[int, Any] = {id(p): twin for p, twin in zip(given, small, strict=True)}
    memo[id(optimizer.state)] = defaultdict(dict)
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler puts one there, which steps the optimizer itself
            is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
            twin.__dict__[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    for group in twin.param_groups:
        rate = group.get("lr")
        if rate is not None:
            group["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
    return twin


def _same(first: list[torch.Tensor], second: list[torch.Tensor], parts: tuple[int, ...]) -> bool:
    pairs = [pair for number, pair in enumerate(zip(first, second, strict=True)) if number % 2 in parts]
    return all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * _RATE, equal_nan=True) for a, b in pairs)
