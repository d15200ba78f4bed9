"""Whether what the ranks of a pipeline recorded is what one process recorded, and by how much it differs.

Models: values that any rank may have read, some of them only; dictionaries of gradients or parameters, of which each
rank has its own part. Ignores: how they came about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# A gradient that is zero in exact arithmetic has no relative error: it is compared with this part of the largest one.
_SMALLEST_NORM = 1e-4


@dataclass(frozen=True)
class Tolerance:
    """Relative errors allowed for values and for gradients."""

    values: float
    gradients: float


TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float64: Tolerance(1e-12, 1e-10),
    torch.bfloat16: Tolerance(1e-5, 1e-5),
}


@dataclass
class Comparison:
    """What is not equal, in words, and the largest relative errors of gradients, of losses and of other values."""

    problems: list[str] = field(default_factory=list)
    gradient_error: float | None = None
    loss_error: float | None = None

    def add(self, where: str, error: float, allowed: float, *, gradient: bool) -> None:
        """Note one relative error."""
        error = math.inf if math.isnan(error) else error
        if gradient:
            self.gradient_error = max(self.gradient_error or 0.0, error)
        else:
            self.loss_error = max(self.loss_error or 0.0, error)
        if not error <= allowed:
            self.problems.append(f"{where}: relative error {error:.2g}")


def compare(plain: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], tolerance: Tolerance) -> Comparison:
    """Every record of the plain process with those of the ranks."""
    result = Comparison()
    for key, expected in plain.items():
        if key == "order":
            continue
        found = [records[key] for records in ranks if key in records]
        if not found:
            result.problems.append(f"{key}: no rank recorded it")
        elif isinstance(expected[0], dict):
            _compare_parts(key, expected, found, tolerance.gradients, result)
        else:
            _compare_values(key, expected, found, tolerance.values, result)
    extra = {key for records in ranks for key in records} - set(plain)
    result.problems += [f"{key}: only ranks recorded it" for key in sorted(extra)]
    return result


def _compare_values(key: str, expected: list[Any], ranks: list[list[Any]], allowed: float, result: Comparison) -> None:
    if max(map(len, ranks)) < len(expected) and sum(map(len, ranks)) != len(expected):
        result.problems.append(f"{key}: not all {len(expected)} values were recorded by some rank")
    for rank, values in enumerate(ranks):
        if len(values) == len(expected):
            for i, (value, wanted) in enumerate(zip(values, expected, strict=True)):
                error, limit = _error(value, wanted), _limit(wanted, allowed)
                where = f"{key} on rank {rank}, record {i}"
                if not error <= limit:
                    where += f": {_shown(value)} instead of {_shown(wanted)}"
                result.add(where, error, limit, gradient=False)
        else:
            _compare_some(key, values, expected, allowed, result)


def _compare_some(key: str, values: list[Any], expected: list[Any], allowed: float, result: Comparison) -> None:
    """A rank that recorded some of the values only must have the right ones in the right order."""
    remaining = iter(expected)
    for value in values:
        if not any(_error(value, candidate) <= _limit(candidate, allowed) for candidate in remaining):
            result.problems.append(f"{key}: {_shown(value)} is not what one process read")
            return


def _limit(expected: Any, allowed: float) -> float:
    """Elements of a tensor near zero are sums that cancel: they are allowed more."""
    return 10 * allowed if isinstance(expected, torch.Tensor | list) else allowed


def _shown(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) and value.dim() else repr(value)


def _error(value: Any, expected: Any) -> float:
    """Relative error; infinite for values that are of another kind, or differ and have none."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.shape != expected.shape or value.dtype != expected.dtype:
            return math.inf
        if not expected.is_floating_point():
            return 0.0 if torch.equal(value, expected) else math.inf
        if torch.equal(value, expected):  # infinities too
            return 0.0
        difference, size = float((value - expected).norm()), float(expected.norm())
        return 0.0 if difference == 0 else difference / size if size else math.inf
    if isinstance(expected, list | tuple):
        if len(value) != len(expected):
            return math.inf
        return max((_error(a, b) for a, b in zip(value, expected, strict=True)), default=0.0)
    if isinstance(expected, float) and isinstance(value, float):
        if value == expected or (math.isnan(value) and math.isnan(expected)):
            return 0.0
        return abs(value - expected) / abs(expected) if expected and math.isfinite(expected) else math.inf
    return 0.0 if value == expected else math.inf


def _compare_parts(key: str, expected: list[Any], ranks: list[list[Any]], allowed: float, result: Comparison) -> None:
    for i, whole in enumerate(expected):
        largest = max((float(g.norm()) for g in whole.values()), default=0.0)
        missing = set(whole)
        for rank, records in enumerate(ranks):
            if i >= len(records):
                result.problems.append(f"{key}: rank {rank} has no record {i}")
                continue
            for name, part in records[i].items():
                missing.discard(name)
                if name not in whole:
                    result.problems.append(f"{key} of {name} on rank {rank}: there is none in one process")
                    continue
                norm = max(float(whole[name].norm()), _SMALLEST_NORM * largest)
                difference = float((part - whole[name]).norm())
                error = difference / norm if norm else (0.0 if difference == 0 else math.inf)
                if not math.isfinite(float(whole[name].double().sum())):
                    error = 0.0 if torch.equal(part.isfinite(), whole[name].isfinite()) else math.inf
                result.add(f"{key}, record {i}, {name} on rank {rank}", error, allowed, gradient=True)
        if missing:
            result.problems.append(f"{key}, record {i}: no rank has {sorted(missing)}")
