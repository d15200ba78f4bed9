"""What the peers' runs found out, as data: cells of one model and one number of micro-batches, and their targets.

Models: JSON that a later run adds cells to, so that a long measurement can be made in pieces. Ignores: how it is shown
(`peers_table.py`).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

__all__ = ["ACCUMULATION", "AUTO", "FIXED", "PIPELINES", "PLAIN", "Cell", "Check", "Found", "Store", "surroundings"]

PLAIN, ACCUMULATION = "plain", "plain accumulation"
FIXED, AUTO = "pfeife_accelerate", "pfeife_accelerate, auto"
PIPELINES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DeepSpeed")
SHARDED = ("DDP", "FSDP2")

OVER_BEST_PEER, OVER_ACCUMULATION, ESTIMATE_ERROR = 0.97, 1.75, 0.08
OVER_PLAIN: Mapping[str, float] = {"vit": 1.70, "llama": 1.70, "resnet": 1.55, "unet": 1.55}
#: Relative, of the losses of the first step (the same weights) and of the second (after one step of AdamW).
LOSS_TOLERANCES = (1e-5, 2e-3)


@dataclass(frozen=True, kw_only=True)
class Found:
    """One contestant in one cell."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]  #: of the first steps
    peak_mb: tuple[float, ...]  #: of each rank, above what it held after its imports
    bounds: tuple[int, ...] = ()  #: of a split by hand
    plan: Mapping[str, Any] = field(default_factory=dict)  #: of ours

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.seconds)

    def and_then(self, other: Found) -> Found:
        """With the steps of another start; memory is the most of both, the rest as in the first."""
        most_mb = tuple(max(both) for both in zip(self.peak_mb, other.peak_mb, strict=True))
        return replace(self, seconds=self.seconds + other.seconds, peak_mb=most_mb)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A target and what was reached."""

    name: str
    reached: float
    target: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether the target is met."""
        return self.reached >= self.target if self.at_least else self.reached <= self.target


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model at one number of micro-batches, all contestants in one run."""

    model: str
    rows: int
    num_microbatches: int
    has_batch_statistics: bool
    found: Mapping[str, Found]
    failures: Mapping[str, str]
    command: str
    surroundings: Mapping[str, str]

    @property
    def key(self) -> str:
        """Its place in the store."""
        return f"{self.model}/{self.num_microbatches}"

    @property
    def best_peer(self) -> str | None:
        """The pipeline peer with the shortest step."""
        there = [name for name in PIPELINES if name in self.found]
        return min(there, key=lambda name: self.found[name].median_s, default=None)

    @property
    def thriftiest_peer(self) -> str | None:
        """The pipeline peer whose largest rank is smallest."""
        there = [name for name in PIPELINES if name in self.found]
        return min(there, key=lambda name: max(self.found[name].peak_mb), default=None)

    def checks(self) -> Iterator[Check]:
        """Every target that this cell can tell about; the tiny model is for trying the benchmark itself."""
        if self.model not in OVER_PLAIN:
            return
        fixed, auto, plain = self.found.get(FIXED), self.found.get(AUTO), self.found.get(PLAIN)
        accumulation = self.found.get(ACCUMULATION)
        if fixed and self.best_peer and self.thriftiest_peer:
            ratio = fixed.median_s / self.found[self.best_peer].median_s
            yield Check(name=f"step over {self.best_peer}'s", reached=ratio, target=OVER_BEST_PEER, at_least=False)
            for name in dict.fromkeys((self.best_peer, self.thriftiest_peer)):
                ratio = max(fixed.peak_mb) / max(self.found[name].peak_mb)
                yield Check(name=f"memory over {name}'s", reached=ratio, target=1.0, at_least=False)
        if fixed and accumulation:
            ratio = accumulation.median_s / fixed.median_s
            yield Check(name="speed over accumulation", reached=ratio, target=OVER_ACCUMULATION, at_least=True)
        if auto and plain:
            ratio = plain.median_s / auto.median_s
            yield Check(name="auto: speed over plain", reached=ratio, target=OVER_PLAIN[self.model], at_least=True)
        for name, ours in (("estimate's error", fixed), ("auto: estimate's error", auto)):
            if ours and ours.plan:
                error = abs(ours.plan["estimate_s"] / ours.median_s - 1)
                yield Check(name=name, reached=error, target=ESTIMATE_ERROR, at_least=False)

    def has_right_losses(self, name: str) -> bool | None:
        """Whether a contestant's first losses are plain training's; None where the two compute different things."""
        same = PLAIN
        if self.has_batch_statistics:
            number = self.found[name].plan.get("num_microbatches", self.num_microbatches)
            if name in SHARDED or number != self.num_microbatches:
                return None
            same = name if name == PLAIN else ACCUMULATION
        if same not in self.found:
            return None
        trios = zip(self.found[name].losses, self.found[same].losses, LOSS_TOLERANCES, strict=False)
        return all(abs(mine - right) <= tolerance * abs(right) for mine, right, tolerance in trios)


class Store:
    """The file of all cells, and of splits that were tried out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cells(self) -> list[Cell]:
        """All that have been measured, in a stable order."""
        cells = [_cell(data) for data in self._read()["cells"].values()]
        models = list(OVER_PLAIN)
        return sorted(
            cells, key=lambda c: (models.index(c.model) if c.model in models else len(models), c.num_microbatches)
        )

    def add(self, cell: Cell) -> None:
        """Keep a cell, in the place of an older one."""
        data = self._read()
        data["cells"][cell.key] = asdict(cell)
        self._write(data)

    def split(self, cell: str, order: str) -> tuple[int, ...] | None:
        """A split that has been tried out and found best."""
        found = self._read()["splits"].get(f"{cell}/{order}")
        return None if found is None else tuple(found)

    def add_split(self, cell: str, order: str, bounds: Sequence[int]) -> None:
        """Keep a split."""
        data = self._read()
        data["splits"][f"{cell}/{order}"] = list(bounds)
        self._write(data)

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"cells": {}, "splits": {}}
        return dict(json.loads(self.path.read_text(encoding="utf-8")))

    def _write(self, data: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _cell(data: dict[str, Any]) -> Cell:
    found = {
        name: Found(
            seconds=tuple(values["seconds"]),
            losses=tuple(values["losses"]),
            peak_mb=tuple(values["peak_mb"]),
            bounds=tuple(values["bounds"]),
            plan=values["plan"],
        )
        for name, values in data["found"].items()
    }
    return Cell(**{**data, "found": found})


def surroundings(*folders: Path | None) -> dict[str, str]:
    """Versions (also of what is installed in further folders) and processor: all a reader needs of the machine."""
    models = {
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    }
    path = [*sys.path, *(str(folder) for folder in folders if folder is not None)]
    packages = {
        name: next((found.version for found in distributions(name=name, path=path)), "not installed")
        for name in ("torch", "accelerate", "timm", "transformers", "diffusers", "deepspeed")
    }
    processor = f"{', '.join(sorted(models))}, {os.cpu_count()} cores"
    return {"Python": platform.python_version(), **packages, "processor": processor}
