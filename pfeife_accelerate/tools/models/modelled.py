"""A model's training step as cost graphs: captured once on fake tensors, costed for a device at any number of rows.

Models: roofline times of every operation; kept memory, each storage once; a parameter's gradient and optimizer state
as Adam keeps them in mixed precision. Ignores: the loss, which mixes the rows and is no part of any stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from pfeife_accelerate.capture.failure import CaptureFailure
from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.op_graph import to_op_graph
from pfeife_accelerate.cost.op_profile import measure
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, CostTable, DeviceSpec, OpGraph, cost_graph_of
from pfeife_accelerate.ir.costs import MeasurableOp
from pfeife_accelerate.tools.models.case import ModelCase

__all__ = ["OPTIMIZER_BYTES", "STATE_BYTES", "ModelledModel"]

#: Bytes for each element of a parameter. In 16 bits: parameter and gradient 2 each, Adam's two states and the copy in
#: full precision 4 each; in 32 bits: four times 4.
STATE_BYTES: Final = 16
#: Bytes that a step of Adam moves for each: it reads the gradient, reads and writes the rest.
OPTIMIZER_BYTES: Final = 28

_CPU = torch.device("cpu")

#: Gives the costs of operations.
Measured: TypeAlias = Callable[[Sequence[MeasurableOp | None]], CostTable]


class ModelledModel:
    """The captured training step of a model case.

    Raises: PfeifeError PF137 if its batch cannot be divided, PF510 if it cannot be captured.
    """

    def __init__(self, case: ModelCase) -> None:
        self.name = case.name
        batch = dict(case.batch)
        capture = ModelCapture(case.module, _CPU)
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"torch\._dynamo")  # its remarks concern a real run
                self._call = capture.call((), batch, None)
        except CaptureFailure as failure:
            raise failure.refusal from failure
        if self._call.graph.refusal is not None:
            raise PfeifeError(
                id="PF137",
                what=f"{self.name} cannot be planned for: its batch cannot be divided into micro-batches",
                why=self._call.graph.refusal,
            )
        self._states = capture.states()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, a shared one once."""
        return sum(state.numel() for state in self._states.values() if isinstance(state, nn.Parameter))

    @property
    def least_rows(self) -> int:
        """The fewest rows that a micro-batch may have: BatchNorm has no statistics of a single one."""
        return 2 if self._call.graph.has_batch_statistics else 1

    def op_graph(self, rows: int) -> OpGraph:
        """The operations on a micro-batch of that many rows."""
        return to_op_graph(self._call.graph, self._bindings(rows))

    def cost_graph(
        self, rows: int, spec: DeviceSpec, *, device: torch.device = _CPU, measured: Measured | None = None
    ) -> CostGraph:
        """What they should cost on a device like `spec`: modelled, or as they are `measured` on `device`."""
        ops = measurable_ops(self._call.graph, self._bindings(rows), device)
        # Without time to measure, all is modelled.
        table = measured(ops) if measured else CostTable(ops=measure(ops, device, budget_s=0.0, spec=spec))
        state = {
            name: (value.numel() * STATE_BYTES, value.numel() * OPTIMIZER_BYTES / spec.bytes_per_s)
            for name, value in self._states.items()
            if value.requires_grad
        }
        return cost_graph_of(self.op_graph(rows), table, state, name=self.name, bytes_per_s=spec.bytes_per_s)

    def _bindings(self, rows: int) -> dict[Any, int]:
        batch_symbols = self._call.graph.batch_symbols
        return {symbol: rows if symbol in batch_symbols else value for symbol, value in self._call.bindings.items()}
