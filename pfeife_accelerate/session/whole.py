"""The whole model on one rank, for a while or as a state dict: other ranks' tensors are fetched one-sidedly.

Models: one request a holding rank, all tensors as of the same logical moment. Ignores: sharding what is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from pfeife_accelerate.compat import state_holders

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel

_TENSORS_PER_REQUEST = 32


def fetch_states(model: PipelinedModel, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Parameters and buffers that this rank does not hold, on the CPU, by canonical name."""
    session = model.session
    first = session.mesh.pipeline_index * session.mesh.pipeline_size
    by_owner: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        by_owner.setdefault(model.placement.owner(name), []).append(name)
    index = session.models.index(model)
    found: dict[str, torch.Tensor] = {}
    for owner, wanted in by_owner.items():
        for start in range(0, len(wanted), _TENSORS_PER_REQUEST):
            some = wanted[start : start + _TENSORS_PER_REQUEST]
            keys = [f"{index}/{name}" for name in some]
            tensors = session.control.fetch_many(first + owner, "state", keys, clock=session.control.clock)
            found.update(zip(some, tensors, strict=True))
    return found


def is_elsewhere(model: PipelinedModel, name: str) -> bool:
    """Whether the current value of a parameter or buffer is on another rank only."""
    ranks = model.placement.ranks_of.get(name)
    return ranks is not None and model.session.mesh.rank not in ranks


class WholeStateDict:
    """Hooks that make `state_dict()` of a pipelined model, or of a part of it, whole on whichever rank calls it."""

    def __init__(self, model: PipelinedModel) -> None:
        self.model = model
        self._depth = 0

    def install(self) -> None:
        """Hook every module: the outermost one that is asked completes the result."""
        enter, leave = partial(self._enter), partial(self._leave)  # torch marks hooks by an attribute: no bound methods
        for module in self.model.module.modules():
            module.register_state_dict_pre_hook(enter)
            module.register_state_dict_post_hook(leave)

    def _enter(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self.model.plan is not None:
            self._complete(module, state_dict, prefix)

    def _complete(self, module: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        canonical = {id(tensor): name for name, tensor in self.model.states.items()}
        wanted: dict[str, str] = {}
        for source in (module.named_parameters, module.named_buffers):
            for key, tensor in source(prefix=prefix.removesuffix("."), remove_duplicate=False):
                name = canonical.get(id(tensor))
                if key in state_dict and name is not None and is_elsewhere(self.model, name):
                    wanted[key] = name
        found = fetch_states(self.model, wanted.values())
        for key, name in wanted.items():
            state_dict[key] = found[name]


@contextmanager
def whole_module(model: PipelinedModel) -> Iterator[nn.Module]:
    """The plain module with all of its parameters in place on this rank, as long as the context lasts."""
    if model.plan is None:
        with model.plain_forward():
            yield model.module
        return
    canonical = {id(tensor): name for name, tensor in model.states.items()}
    elsewhere = [name for name in model.states if is_elsewhere(model, name)]
    found = {name: tensor.to(model.device) for name, tensor in fetch_states(model, elsewhere).items()}
    replaced: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    try:
        for module in model.module.modules():
            for holder in state_holders(module):
                for key, tensor in holder.items():
                    name = canonical.get(id(tensor))
                    if tensor is not None and name in found:
                        replaced.append((holder, key, tensor))
                        here = found[name]
                        is_parameter = isinstance(tensor, nn.Parameter)
                        holder[key] = nn.Parameter(here, requires_grad=False) if is_parameter else here
        with model.plain_forward():
            yield model.module
    finally:
        for holder, key, tensor in replaced:
            holder[key] = tensor
