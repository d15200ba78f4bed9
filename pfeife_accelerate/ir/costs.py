"""What operations and stages cost: seconds and bytes for one micro-batch; and operations made ready for measuring.

Models: forward and backward time apart, memory kept for the backward, temporary memory.
Ignores: interference between operations that run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pfeife_accelerate.ir.tensors import TensorSpec

__all__ = [
    "CostOrigin",
    "CostTable",
    "MeasurableOp",
    "OpCost",
    "Operand",
    "OperandRole",
    "PreparedOp",
    "StageCost",
    "TrialStage",
]


class CostOrigin(str, Enum):
    """Where a number comes from."""

    MEASURED = "measured"
    MODELLED = "modelled"


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """One operation on one micro-batch.

    `backward_weight_s` is what the second half of a split backward does: nothing for an operation that cannot be put
    off, whose gradients are all computed in the first.
    """

    forward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    saved_bytes: int = 0  #: kept from its forward to its backward
    workspace_bytes: int = 0  #: needed only while it runs
    origin: CostOrigin = CostOrigin.MODELLED

    @property
    def backward_s(self) -> float:
        """Both halves of the backward, in seconds."""
        return self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Costs aligned with the operations of a graph: `ops[i]` belongs to `graph.nodes[i]`."""

    ops: tuple[OpCost, ...]


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage on one micro-batch. `workspace_bytes` is the most it needs beyond what it saves.

    `backward_s` is the whole backward; its part for the gradients of parameters is `backward_weight_s`.
    """

    forward_s: float
    backward_s: float
    backward_weight_s: float = 0.0
    param_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0


class OperandRole(str, Enum):
    """What a tensor is to the operation: the model's (parameter, buffer, constant), the call's, or computed."""

    STATE = "state"
    INPUT = "input"
    ACTIVATION = "activation"


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor that an operation reads or writes; `storage` is equal for tensors of a graph that share memory."""

    spec: TensorSpec
    storage: int
    storage_bytes: int
    role: OperandRole = OperandRole.ACTIVATION


@dataclass(frozen=True, kw_only=True)
class TrialStage:
    """Operations that are run together: `forward()` gives the tensors (torch's) that a backward pass starts from.

    `values` are leaves that are no parameters: in a step their gradients go to the stage before.
    """

    forward: Callable[[], list[Any]]
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class PreparedOp:
    """An operation with real tensors: `run` does it once, `reads` are the tensors behind `MeasurableOp.reads`."""

    run: Callable[[], Any]
    reads: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class MeasurableOp:
    """One operation at concrete sizes, ready to be measured by whoever knows nothing of graphs.

    Operations with equal keys cost the same. `prepare` makes made-up tensors (it draws random numbers), `context` gives
    the autocast and gradient mode to run in, and an operation that mutates its input is prepared anew for every run.
    """

    key: str
    target: str  #: the operation's name, e.g. `linear`
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    prepare: Callable[[], PreparedOp]
    context: Callable[[], AbstractContextManager[Any]]
    is_inplace: bool = False
    region: int | None = None  #: the region computed again in the backward pass that it belongs to
    puts_off: bool = False  #: whether the gradients of its parameters can be computed later than those of its values
