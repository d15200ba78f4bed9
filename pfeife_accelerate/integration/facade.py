"""The face that a pipelined model shows the script: the model itself, with another `forward`.

Class, attributes, parameter names and identity stay; `accelerator.unwrap_model` returns the same object. Other methods
than `forward` that run the model (`generate`) run it whole, on the ranks that call them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pfeife_accelerate import session
from pfeife_accelerate.session.model import PipelinedModel
from pfeife_accelerate.session.whole import WholeState, plain_copy, whole_module

_WHOLE_METHODS = ("generate",)
_FACE = ("forward", "no_sync", "__deepcopy__", *_WHOLE_METHODS)


def pipelined(module: nn.Module, device: torch.device, autocast: tuple[str, torch.dtype] | None) -> nn.Module:
    """Make a module's calls run as a pipeline of the running session; returns the same object."""
    running = session.current()
    assert running is not None, "a session is running when a model is prepared"
    _drop_cached_weights(module)
    model = PipelinedModel(running, module, device, autocast)
    before = dict(vars(module))
    module.forward = _forward(model)  # type: ignore[method-assign]
    for name in _WHOLE_METHODS:
        method = getattr(type(module), name, None)
        if method is not None:
            setattr(module, name, _on_whole_module(model, getattr(module, name)))
    module.no_sync = _no_sync(model)  # type: ignore[assignment]
    module.__deepcopy__ = _deep_copy(model, before)  # type: ignore[assignment]
    WholeState(model).install()
    return module


def _drop_cached_weights(module: nn.Module) -> None:
    """Let go of the graphs that the older `torch.nn.utils.weight_norm` keeps.

    It leaves the weight that it computed from `weight_g` and `weight_v` on the module. Every forward computes it anew,
    but while it is there, its graph holds the parameters, whose memory could not be freed.
    """
    for part in module.modules():
        own = dict(part.named_parameters(recurse=False))
        for name in [n.removesuffix("_g") for n in own if n.endswith("_g") and f"{n.removesuffix('_g')}_v" in own]:
            cached = vars(part).get(name)
            if isinstance(cached, torch.Tensor):
                vars(part)[name] = cached.detach()


def _forward(model: PipelinedModel) -> Callable[..., Any]:
    @functools.wraps(model.capture.original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return forward


def _on_whole_module(model: PipelinedModel, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with whole_module(model), torch.no_grad():
            return method(*args, **kwargs)

    return run


def _no_sync(model: PipelinedModel) -> Callable[[], Any]:
    @contextmanager
    def no_sync() -> Iterator[None]:
        """Keep gradients of this pipeline to itself, as DistributedDataParallel.no_sync does."""
        before, model.synchronises = model.synchronises, False
        try:
            yield
        finally:
            model.synchronises = before

    return no_sync


def _deep_copy(model: PipelinedModel, before: dict[str, Any]) -> Callable[[dict[int, Any]], nn.Module]:
    """`copy.deepcopy(model)`, as for a moving average: an ordinary module, whole on the rank that asks."""

    def deep_copy(memo: dict[int, Any]) -> nn.Module:
        return plain_copy(model, before, _FACE, memo)

    return deep_copy
