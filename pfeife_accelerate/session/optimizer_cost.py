"""What training keeps of each parameter with the script's own optimizers, and what their step costs.

Models: parameter, gradient and optimizer state by element type; state that exists already is counted, that to come is
known for torch's optimizers and the usual others by name and options; the step moves these bytes so many times, and
starts so many operations where it goes parameter by parameter.
Ignores: what a step needs for a moment (a foreach step as much as the parameters: no activations are alive then), and
buffers for averaging over pipelines. Accelerate's mixed precision makes no lasting copies: autocast's are kept by the
operations that read them, and counted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from pfeife_accelerate.ir import DeviceSpec

__all__ = ["ParameterCost", "parameter_costs", "training_state"]

_Options = Mapping[str, Any]
_QUANTISED_FROM: Final = 4096  # bitsandbytes leaves the state of smaller tensors in float32
_UNKNOWN_STATES: Final = 2
_LEAST_MOVES: Final = 3  # the parameter is read and written, the gradient read


@dataclass(frozen=True, kw_only=True)
class ParameterCost:
    """One parameter: bytes of itself, its gradient, its optimizer state; seconds of its part of the step."""

    param_bytes: int
    gradient_bytes: int = 0
    state_bytes: int = 0
    optimizer_s: float = 0.0

    @property
    def total_bytes(self) -> int:
        """All that is kept from step to step."""
        return self.param_bytes + self.gradient_bytes + self.state_bytes


def training_state(
    optimizers: Iterable[torch.optim.Optimizer], states: Mapping[str, torch.Tensor], device: DeviceSpec
) -> dict[str, tuple[int, float]]:
    """`parameter_costs` as `ir.cost_graph_of` takes them: all bytes together, and seconds."""
    costs = parameter_costs(optimizers, states, device)
    return {name: (cost.total_bytes, cost.optimizer_s) for name, cost in costs.items()}


def parameter_costs(
    optimizers: Iterable[torch.optim.Optimizer], states: Mapping[str, torch.Tensor], device: DeviceSpec
) -> dict[str, ParameterCost]:
    """The cost of each parameter and buffer of a model, by the names that `states` gives them.

    Where no optimizer at all has been prepared, trained parameters are taken to have an unknown one, which keeps two
    states; where some have, a parameter that none of them has keeps its gradient alone.
    """
    known = [inner for optimizer in optimizers for inner in _innermost(optimizer)]
    groups = {id(p): (optimizer, group) for optimizer in known for group in optimizer.param_groups
              for p in group["params"]}  # fmt: skip
    found: dict[str, ParameterCost] = {}
    for name, tensor in states.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if not tensor.requires_grad:
            found[name] = ParameterCost(param_bytes=num_bytes)
        elif id(tensor) in groups:
            found[name] = _trained(tensor, num_bytes, *groups[id(tensor)], device)
        else:
            state_bytes = 0 if known else _UNKNOWN_STATES * num_bytes
            moved_bytes = 0 if known else _LEAST_MOVES * num_bytes + 2 * state_bytes
            found[name] = ParameterCost(
                param_bytes=num_bytes,
                gradient_bytes=num_bytes,
                state_bytes=state_bytes,
                optimizer_s=moved_bytes / device.bytes_per_s,
            )
    return found


def _trained(
    parameter: torch.Tensor, num_bytes: int, optimizer: torch.optim.Optimizer, group: _Options, device: DeviceSpec
) -> ParameterCost:
    kept = [value for value in _values(optimizer.state.get(parameter)) if value.dim() > 0]
    state_bytes = sum(value.numel() * value.element_size() for value in kept)
    if not kept:
        state_bytes = _state_bytes(optimizer, group, parameter)
    num_states = _num_states(optimizer, group)
    moves, operations = _step(optimizer, group, num_states)
    # The state's share of the moves follows its real size: a factored one is hardly moved at all.
    state_moves = moves - _LEAST_MOVES
    moved_bytes = _LEAST_MOVES * num_bytes + state_moves * state_bytes / max(num_states, 1)
    starts_s = 0.0 if _is_batched(group, parameter) else operations * device.launch_s
    return ParameterCost(
        param_bytes=num_bytes,
        gradient_bytes=num_bytes,
        state_bytes=state_bytes,
        optimizer_s=moved_bytes / device.bytes_per_s + starts_s,
    )


def _innermost(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizers inside one (as LookAhead has), or itself."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    for one in inner:
        yield from _innermost(one)
    if not inner:
        yield optimizer


def _values(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _values(value)


# ---------------------------------------------------------------------------------------------------------------------
# What is known of optimizers, by the name of the class
# ---------------------------------------------------------------------------------------------------------------------


def _always(number: int) -> Callable[[_Options], int]:
    return lambda group: number


def _adam(group: _Options) -> int:
    return 3 if group.get("amsgrad") else 2


#: State tensors of the parameter's size.
_STATES: Final[dict[str, Callable[[_Options], int]]] = {
    "SGD": lambda group: int(bool(group.get("momentum"))),
    "Adam": _adam,
    "AdamW": _adam,
    "NAdam": _always(2),
    "RAdam": _always(2),
    "Adamax": _always(2),
    "SparseAdam": _always(2),
    "Adadelta": _always(2),
    "Adagrad": _always(1),
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": _always(2),
    "ASGD": _always(1),
    "Lion": _always(1),
    "Muon": _always(1),
    "Adafactor": lambda group: int(group.get("beta1") is not None),
}


def _known_name(optimizer: torch.optim.Optimizer) -> tuple[str | None, bool]:
    """The name in the table, and whether the state is kept in eight bits."""
    for kind in type(optimizer).__mro__:
        name = kind.__name__.removeprefix("Paged")
        plain = name.removesuffix("8bit")
        if plain in _STATES:
            return plain, plain != name
    return None, False


def _num_states(optimizer: torch.optim.Optimizer, group: _Options) -> int:
    name, _ = _known_name(optimizer)
    return _UNKNOWN_STATES if name is None else _STATES[name](group)


def _state_bytes(optimizer: torch.optim.Optimizer, group: _Options, parameter: torch.Tensor) -> int:
    """Bytes of the state that the first step will make."""
    name, eight_bits = _known_name(optimizer)
    states, numel, size = _num_states(optimizer, group), parameter.numel(), parameter.element_size()
    if eight_bits:
        return states * (numel + numel // 64 if numel >= _QUANTISED_FROM else 4 * numel)
    if name != "Adafactor":
        return states * numel * size
    if not type(optimizer).__module__.startswith("torch."):  # that of transformers keeps its state in float32
        size = max(size, 4)
    shape = parameter.shape
    rows_and_columns = prod(shape[:-1]) + prod(shape[:-2]) * shape[-1] if len(shape) > 1 else numel
    return (states * numel + rows_and_columns) * size


def _step(optimizer: torch.optim.Optimizer, group: _Options, num_states: int) -> tuple[float, int]:
    """How often a step moves the parameter's bytes, and how many operations it starts for one parameter.

    A fused step reads and writes everything once. Otherwise each state is a handful of operations: counted in torch's
    own, Adam moves 18 times the parameter's bytes in 9 operations, SGD with momentum 8 times in 3.
    """
    decay = 2 if group.get("weight_decay") else 0
    if group.get("fused"):
        return _LEAST_MOVES + 2 * num_states, 1
    per_state = 7.5 if num_states > 1 else 5.0
    return _LEAST_MOVES + decay + per_state * num_states, 1 + bool(decay) + 4 * num_states


def _is_batched(group: _Options, parameter: torch.Tensor) -> bool:
    """Whether one operation serves many parameters: torch's choice on a GPU, unless the script says otherwise."""
    if group.get("fused"):
        return True
    foreach = group.get("foreach")
    return parameter.device.type == "cuda" if foreach is None else bool(foreach)
