"""Optimizer state over a pipeline: a rank keeps its own parameters' state, a state dict is whole wherever it is asked.

Models: optimizers whose state per parameter is a flat dictionary of tensors and numbers, as torch's are.
Ignores: state that is shared between parameters of different stages.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.log import get_logger, warn_once
from pfeife_accelerate.session.optimizer_trial import mixes_parameters

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session
    from pfeife_accelerate.session.model import PipelinedModel

_LOG = get_logger(__name__)


class OptimizerStates:
    """The prepared optimizers of a process, in the order in which the script prepared them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._optimizers: list[torch.optim.Optimizer] = []
        self._tried: WeakSet[torch.optim.Optimizer] = WeakSet()
        self.is_trying = False
        """Whether the optimizer that steps now is a twin that nobody else knows."""
        session.control.serve("optimizer entries", self._give_entries)
        session.control.serve("optimizer tensor", self._give_tensor)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's state dict whole from now on, and its loaded state this rank's own."""
        if any(optimizer is known for known in self._optimizers):
            return
        index = len(self._optimizers)
        self._optimizers.append(optimizer)
        optimizer.register_state_dict_post_hook(partial(self._complete, index))
        optimizer.register_load_state_dict_pre_hook(_without_elsewhere)
        optimizer.register_load_state_dict_post_hook(_forget_elsewhere)

    @property
    def known(self) -> tuple[torch.optim.Optimizer, ...]:
        """The prepared optimizers."""
        return tuple(self._optimizers)

    def forget_elsewhere(self) -> None:
        """Free the state of parameters that have just been placed on other ranks."""
        for optimizer in self._optimizers:
            _forget_elsewhere(optimizer)

    def refuse_mixing(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for optimizers whose step for one parameter depends on all of them, if these live on several ranks."""
        refuse_sums_over_all(optimizer)
        if optimizer in self._tried or not self.session.models:
            return
        self._tried.add(optimizer)
        if self._mixes(optimizer) and len(self._owners(optimizer)) > 1:
            raise _depends_on_all(type(optimizer).__name__)

    def _mixes(self, optimizer: torch.optim.Optimizer) -> bool:
        self.is_trying = True
        try:
            return mixes_parameters(optimizer)
        except Exception as error:  # whatever a script's own optimizer does with parameters that it does not expect
            name = type(optimizer).__name__
            warn_once(
                _LOG,
                f"optimizer {name}",
                f"{name} is taken to treat each parameter by itself; that could not be tried out: "
                f"{type(error).__name__}: {error}",
            )
            return False
        finally:
            self.is_trying = False

    def _owners(self, optimizer: torch.optim.Optimizer) -> set[int | None]:
        """Ranks that have the parameters; None stands for every rank."""
        found = [self._model_and_name(p) for group in optimizer.param_groups for p in group["params"]]
        return {None if place is None else place[0].placement.owner(place[1]) for place in found}

    def _complete(self, index: int, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = dict(state_dict["state"])
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                found = self._model_and_name(parameter) if parameter.is_meta else None
                if found is not None:
                    entries = self._fetch(index, *found)
                    if entries:
                        state[number] = entries
        return {**state_dict, "state": dict(sorted(state.items()))}

    def _fetch(self, index: int, model: PipelinedModel, name: str) -> dict[str, Any]:
        session = self.session
        owner = session.mesh.pipeline_index * session.mesh.pipeline_size + model.placement.owner(name)
        prefix = f"{index}/{session.models.index(model)}/{name}"
        clock = session.control.clock
        described = session.control.fetch(owner, "optimizer entries", prefix, clock=clock)
        entries: dict[str, Any] = json.loads(bytes(described.tolist()))
        tensors = [key for key, value in entries.items() if value is None]
        keys = [f"{prefix}/{key}" for key in tensors]
        fetched = session.control.fetch_many(owner, "optimizer tensor", keys, clock=clock) if keys else []
        return {**entries, **dict(zip(tensors, fetched, strict=True))}

    def _model_and_name(self, parameter: torch.Tensor) -> tuple[PipelinedModel, str] | None:
        for model in self.session.models:
            for name, own in model.placement.parameters.items():
                if own is parameter:
                    return model, name
        return None

    # -------------------------------------------------------------------------------------------- server thread

    def _state_at(self, key: str) -> tuple[dict[str, Any], str]:
        index, model, name_and_key = key.split("/", 2)
        name, _, entry = name_and_key.partition("/")
        parameter = self.session.models[int(model)].placement.parameters[name]
        return self._optimizers[int(index)].state.get(parameter, {}), entry

    def _give_entries(self, key: str) -> torch.Tensor:
        """Names of a parameter's state entries as JSON; null stands for a tensor to be fetched."""
        state, _ = self._state_at(key)
        plain = {name: None if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        return torch.tensor(list(json.dumps(plain).encode()), dtype=torch.uint8)

    def _give_tensor(self, key: str) -> torch.Tensor | None:
        state, entry = self._state_at(key)
        value = state.get(entry)
        return value if isinstance(value, torch.Tensor) else None


def _forget_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    for parameter in [p for p in optimizer.state if p.is_meta]:
        del optimizer.state[parameter]


def _without_elsewhere(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before loading: torch would move the state of all parameters to the device."""
    state = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):  # torch compares them
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            if parameter.is_meta:
                state.pop(number, None)
    return {**state_dict, "state": state}


# Beside torch's own: optimizers that add up over all parameters inside `step`, by the beginning of their name.
_SUMS_OVER_ALL = ("Prodigy", "DAdapt", "SAM", "GSAM", "ASAM", "LBFGS", "FullBatchLBFGS")


def refuse_sums_over_all(optimizer: torch.optim.Optimizer) -> None:
    """Raise for optimizers whose step for one parameter depends on all of them, if some live on other ranks."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    found = next((name for name in names if name.startswith(_SUMS_OVER_ALL)), None)
    if found is None or not any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        return
    raise _depends_on_all(found)


def _depends_on_all(name: str) -> PfeifeError:
    return PfeifeError(
        id="PF528",
        what=f"the optimizer {name} cannot train a pipelined model",
        why="its step for one parameter depends on the gradients of all, and each rank has those of its own stages",
        hints=(
            "use an optimizer that treats each parameter by itself: SGD, Adam, AdamW, Adafactor, Lion, ...",
            "if it limits the norm of all gradients, switch that off and call accelerator.clip_grad_norm_ before",
        ),
    )
