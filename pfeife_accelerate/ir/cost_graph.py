"""A model's operations with what they cost: all that the planner knows of a model.

Models: one micro-batch of one size; forward and both halves of the backward; parameters by owner, so that a tied one
counts once a rank; every tensor with its readers, so that it is sent once to each rank that reads it.
Ignores: what the operations compute, shapes, names of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from pfeife_accelerate.errors import InternalError

__all__ = ["CostGraph", "CostNode", "CostValue", "ParamUse"]

_COSTS = frozenset((
    "backward_input_s", "backward_weight_s", "forward_s", "gradient_bytes", "num_bytes", "optimizer_s", "saved_bytes",
    "state_bytes", "workspace_bytes",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ParamUse:
    """A parameter that an operation reads. `owner` is equal for all uses of one storage, whoever reads it."""

    owner: int
    num_bytes: int
    state_bytes: int  #: parameter, gradient and optimizer state together
    optimizer_s: float = 0.0  #: its part of the optimizer step


@dataclass(frozen=True, kw_only=True)
class CostNode:
    """One operation on one micro-batch."""

    op: str
    forward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    saved_bytes: int = 0  #: kept from its forward to its backward
    workspace_bytes: int = 0  #: needed only while it runs
    params: tuple[ParamUse, ...] = ()
    cut_allowed: bool = True  #: whether a cut directly before this operation is legal

    @property
    def backward_s(self) -> float:
        """Both halves of the backward, in seconds."""
        return self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, kw_only=True)
class CostValue:
    """One tensor: the operation that makes it, those that read it (increasing), its size there and back."""

    producer: int
    readers: tuple[int, ...]
    num_bytes: int
    gradient_bytes: int = 0  #: 0 where no gradient flows


@dataclass(frozen=True, kw_only=True)
class CostGraph:
    """Operations in a topological order. A cut at p lies directly before operation p."""

    name: str
    nodes: tuple[CostNode, ...]
    values: tuple[CostValue, ...]
    fingerprint: str = ""  #: of the graph that it was made from

    def __post_init__(self) -> None:
        """Refuse a value that is read before it is made, and numbers that no operation or value can have."""
        last = len(self.nodes) - 1
        for value in self.values:
            if not 0 <= value.producer < min(value.readers, default=last + 1) or max(value.readers, default=0) > last:
                raise InternalError(id="PF153", what=f"{value} does not fit a graph of {last + 1} operations")
        for part in (*self.nodes, *self.values, *(use for node in self.nodes for use in node.params)):
            for name, number in vars(part).items():
                if name in _COSTS and not 0 <= number < inf:  # not a number is neither
                    raise InternalError(id="PF153", what=f"{name}={number} in {part}", why="costs are at least 0")

    @cached_property
    def legal_cuts(self) -> tuple[int, ...]:
        """Positions where a cut is allowed, both ends excluded."""
        return tuple(position for position, node in enumerate(self.nodes) if position and node.cut_allowed)

    @property
    def work_s(self) -> float:
        """Forward and backward of all operations on one micro-batch, in seconds."""
        return sum(node.forward_s + node.backward_s for node in self.nodes)
