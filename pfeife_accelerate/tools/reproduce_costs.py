"""Cost graphs of the paper's models at full size: captured once on fake tensors, kept as cost files where wanted.

Models: roofline times on the simulated device, convolutions in 32 bits at their own rate. A loss outside the
model by the size of what it reads. Ignores: what such a loss computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

import pfeife_accelerate
from pfeife_accelerate.cost.op_profile import measure
from pfeife_accelerate.ir import CostGraph, CostTable, read_cost_file, write_cost_file
from pfeife_accelerate.ir.costs import MeasurableOp
from pfeife_accelerate.tools.models import ModelledModel, ModelOptions, resolve
from pfeife_accelerate.tools.reproduce_settings import Setting, simulated_machine

__all__ = ["Graphs", "file_name"]

_CPU: Final = torch.device("cpu")
_DTYPES: Final = {"fp16": torch.float16, "fp32": torch.float32}


class Graphs:
    """Gives the cost graph of a setting at any number of rows; those in `folder` are read, others written there."""

    def __init__(self, folder: Path | None = None, *, tell: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._tell = tell
        self._models: dict[str, ModelledModel] = {}
        self._graphs: dict[tuple[str, int], CostGraph] = {}

    def graph(self, setting: Setting, rows: int) -> CostGraph:
        """The costs of a micro-batch of that many rows.

        Raises: PfeifeError PF135 where the model's library is missing and no file has the costs.
        """
        what = _case_of(setting)
        if (what, rows) not in self._graphs:
            self._graphs[what, rows] = self._read_or_made(setting, what, rows)
        return self._graphs[what, rows]

    def _read_or_made(self, setting: Setting, what: str, rows: int) -> CostGraph:
        path = self._folder / file_name(setting, rows) if self._folder is not None else None
        if path is not None and path.is_file():
            return read_cost_file(path)[0]
        if what not in self._models:
            self._tell(f"capturing {what}")
            self._models.clear()  # one model at a time is kept: settings of the same one follow each other
            self._models[what] = ModelledModel(resolve(setting.model, _options(setting)))
        graph = self._models[what].cost_graph(rows, simulated_machine(1).device_of(0), measured=_modelled)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_cost_file(path, graph, simulated_machine(1))
        return graph


def file_name(setting: Setting, rows: int) -> str:
    """Of the cost file: another for another model, other rates, another version."""
    text = f"{_case_of(setting)} {simulated_machine(1)} {simulated_machine(1, convolutions=True)}"
    digest = hashlib.sha256(f"{text} {pfeife_accelerate.__version__}".encode()).hexdigest()[:8]
    return f"{setting.model}-{setting.precision}-{rows}-{digest}.json.gz"


def _case_of(setting: Setting) -> str:
    changed = "".join(f" {key}={value}" for key, value in sorted(setting.overrides.items()))
    return f"{setting.model} {setting.precision}{f' seq={setting.seq}' if setting.seq else ''}{changed}"


def _options(setting: Setting) -> ModelOptions:
    return ModelOptions(dtype=_DTYPES[setting.precision], seq=setting.seq, overrides=setting.overrides)


def _modelled(ops: Sequence[MeasurableOp | None]) -> CostTable:
    """Without time to measure, all is modelled: convolutions by a device of their rate."""
    plain, convolutions = (
        measure(ops, _CPU, budget_s=0.0, spec=simulated_machine(1, convolutions=at).device_of(0))
        for at in (False, True)
    )
    found = [
        there if op is not None and op.target.startswith("conv") else here
        for op, here, there in zip(ops, plain, convolutions, strict=True)
    ]
    return CostTable(ops=tuple(found))
