"""What a rank runs for one stage: a callable, where its arguments come from, and what its results are called.

Models: the interface between capture, which makes stages out of a model, and the executor, which runs them.
Ignores: what the callable does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["InputKind", "Repetition", "StageInput", "StageProgram", "ValueInfo"]


class InputKind(str, Enum):
    """Where an argument of a stage comes from."""

    STATE = "state"  #: a parameter or buffer of the model, by name
    MODEL_INPUT = "input"  #: an argument of the model's call, which every rank has
    VALUE = "value"  #: what an earlier stage computed
    SIZE = "size"  #: a number that follows from the micro-batch's shapes
    SEED = "seed"  #: the number that the micro-batch's random operations derive their seeds from
    LATER = "later"  #: a list that the backward pass puts the computation of weight gradients into; None: it does it


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """One argument of a stage: its kind and its name (a state's name, an argument's index, a value's name)."""

    kind: InputKind
    name: str


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """How a stage runs that keeps its arguments alone and runs once more, with gradients, before its backward.

    `forward` is its first run: it takes and returns what `StageProgram.run` does, and records nothing for a backward
    pass if gradients are off. `changing` are the positions of arguments that the model changes in place, in this stage
    or in another one: the second run gets copies of what they were before the first.
    """

    forward: Callable[..., tuple[Any, ...]]
    changing: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One stage. `run(*arguments)` returns the values called `outputs`, in order."""

    index: int
    run: Callable[..., tuple[Any, ...]]
    inputs: tuple[StageInput, ...]
    outputs: tuple[str, ...]
    repetition: Repetition | None = None  #: of a stage that is to recompute its activations, where it can


@dataclass(frozen=True, kw_only=True)
class ValueInfo:
    """A value that leaves its stage, for one size of micro-batch."""

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool
