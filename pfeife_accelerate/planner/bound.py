"""A time that no plan can beat, whatever its cuts, placement and order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BoundKind", "LowerBound"]


class BoundKind(str, Enum):
    """Which of the arguments gives the highest bound."""

    WORK = "work"
    NODE = "node"
    PATH = "path"


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """No step is shorter than `seconds`."""

    seconds: float
    kind: BoundKind

    def gap(self, estimate_s: float) -> float:
        """How far an estimate is above it, as a share of it."""
        return estimate_s / self.seconds - 1 if self.seconds > 0 else 0.0
