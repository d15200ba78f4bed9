"""Symbolic sizes and the numbers behind them in one call.

Models: symbols that stand alone as a tensor's size or an argument. Ignores: solving for symbols inside expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch

from pfeife_accelerate.compat import expression_of


def concrete(value: Any, bindings: Mapping[Any, int]) -> Any:
    """A size, or a structure of sizes, with numbers put in for the symbols."""
    if isinstance(value, torch.Size | tuple | list):
        return tuple(concrete(item, bindings) for item in value)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        number = expression_of(value).xreplace({k: sympy.Integer(v) for k, v in bindings.items()})
        return int(number) if isinstance(value, torch.SymInt) else float(number)
    return value


def bind(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, int]:
    """Values of the size symbols, from pairs of an example and the argument that is passed for it."""
    bindings: dict[Any, int] = {}
    for example, argument in pairs:
        if isinstance(example, torch.Tensor):
            _note(zip(example.shape, argument.shape, strict=True), bindings)
        elif isinstance(example, torch.SymInt | torch.SymFloat):
            _note([(example, argument)], bindings)
    return bindings


def symbols_of(size: Any) -> frozenset[Any]:
    """The symbols that a size depends on."""
    return frozenset(expression_of(size).free_symbols) if isinstance(size, torch.SymInt) else frozenset()


def _note(pairs: Iterable[tuple[Any, Any]], bindings: dict[Any, int]) -> None:
    for symbolic, number in pairs:
        if isinstance(symbolic, torch.SymInt | torch.SymFloat):
            expression = expression_of(symbolic)
            if expression.is_Symbol:
                bindings[expression] = number
