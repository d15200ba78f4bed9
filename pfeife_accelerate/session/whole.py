"""The whole model on one rank, for a while or as a state dict: other ranks' tensors are fetched one-sidedly.

Models: one request a holding rank, all tensors as of the same logical moment. Ignores: sharding what is fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pfeife_accelerate.compat import state_holders

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel

_TENSORS_PER_REQUEST = 32


def fetch_states(model: PipelinedModel, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The owners' parameters and buffers, on the CPU, by canonical name."""
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
            keys = [f"{index}/{session.num_meetings}/{name}" for name in some]
            tensors = session.control.fetch_many(first + owner, "state", keys, clock=session.control.clock)
            found.update(zip(some, tensors, strict=True))
    return found


def is_elsewhere(model: PipelinedModel, name: str) -> bool:
    """Whether the current value of a parameter or buffer is on another rank only."""
    ranks = model.placement.ranks_of.get(name)
    return ranks is not None and model.session.mesh.rank not in ranks


class _Hook:
    """A hook that belongs to one pipelined model: in copies and pickles of a module it does nothing."""

    def __init__(self, call: Callable[..., None] | None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)


class WholeState:
    """Hooks on the modules of a pipelined model, for `state_dict` and `load_state_dict` of the whole or of any part.

    `state_dict()` is whole on whichever rank calls it. `load_state_dict()` is to be called on all ranks of the
    pipeline: each keeps what is its own.
    """

    def __init__(self, model: PipelinedModel) -> None:
        self.model = model
        self._depth = 0
        self._loading: nn.Module | None = None

    def install(self) -> None:
        """Hook every module: the outermost one that is asked completes the result."""
        enter, leave = _Hook(self._enter), _Hook(self._leave)
        load, loaded = _Hook(self._load), _Hook(self._loaded)
        for module in self.model.module.modules():
            module.register_state_dict_pre_hook(enter)
            module.register_state_dict_post_hook(leave)
            module.register_load_state_dict_pre_hook(load)
            module.register_load_state_dict_post_hook(loaded)

    # ------------------------------------------------------------------ state_dict

    def _enter(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._depth = self._depth + 1 if prefix else 1  # an inner module has a prefix
        if self.model.plan is not None:
            self.model.elsewhere.reads_later = True

    def _leave(self, module: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self.model.plan is not None:
            self.model.elsewhere.reads_later = False
            self._complete(module, state_dict, prefix)

    def _complete(self, module: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        canonical = {id(tensor): name for name, tensor in self.model.states.items()}
        wanted: dict[str, str] = {}
        for source in (module.named_parameters, module.named_buffers):
            for key, tensor in source(prefix=prefix.removesuffix("."), remove_duplicate=False):
                name = canonical.get(id(tensor))
                if key in state_dict and name is not None and is_elsewhere(self.model, name):
                    wanted[key] = name
        found = self.model.elsewhere.values(wanted.values())
        for key, name in wanted.items():
            state_dict[key] = found[name]

    # ------------------------------------------------------------------ load_state_dict

    def _load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if self.model.plan is None:
            return
        if not prefix:
            # A rank that has not come here yet may still read what is about to be overwritten.
            self._loading = module
            self.model.session.meet("load_state_dict")
        for key, parameter in module.named_parameters(prefix.removesuffix("."), recurse=False, remove_duplicate=False):
            given = state_dict.get(key)
            if parameter.is_meta and isinstance(given, torch.Tensor):
                state_dict[key] = torch.empty_like(given, device="meta")  # torch checks its shape, and copies nothing

    def _loaded(self, module: nn.Module, incompatible_keys: object) -> None:
        if module is self._loading:
            self._loading = None
            self.model.session.note_change()


@contextmanager
def whole_module(model: PipelinedModel) -> Iterator[nn.Module]:
    """The plain module with all of its parameters in place on this rank, as long as the context lasts."""
    if model.plan is None:
        with model.plain_forward():
            yield model.module
        return
    canonical = {id(tensor): name for name, tensor in model.states.items()}
    elsewhere = [name for name in model.states if is_elsewhere(model, name)]
    found = {
        name: _like(model.states[name], tensor.to(model.device))
        for name, tensor in model.elsewhere.values(elsewhere).items()
    }
    replaced: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    try:
        for module in model.module.modules():
            for holder in state_holders(module):
                for key, tensor in holder.items():
                    name = canonical.get(id(tensor))
                    if tensor is not None and name in found:
                        replaced.append((holder, key, tensor))
                        holder[key] = found[name]
        with model.plain_forward():
            yield model.module
    finally:
        for holder, key, tensor in replaced:
            holder[key] = tensor


def plain_copy(model: PipelinedModel, plain: Mapping[str, Any], face: Iterable[str], memo: dict[int, Any]) -> nn.Module:
    """A deep copy that is an ordinary module with all of its parameters.

    `face` names the instance attributes that make the module a pipeline, `plain` holds those it had before.
    """
    names = tuple(face)
    with whole_module(model) as module:
        attributes = vars(module)
        ours = {name: attributes.pop(name) for name in names if name in attributes}
        attributes.update({name: plain[name] for name in names if name in plain})
        try:
            return copy.deepcopy(module, memo)
        finally:
            attributes.update(ours)


def _like(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(value, requires_grad=own.requires_grad) if isinstance(own, nn.Parameter) else value
