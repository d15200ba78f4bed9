"""The data of a step out of a call: arguments cut into micro-batches, sizes and shapes for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from pfeife_accelerate.capture.graph import PlaceholderKind
from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups
from pfeife_accelerate.runtime.microbatch import Microbatch, divide, take
from pfeife_accelerate.runtime.step import MicrobatchInputs, StepInputs
from pfeife_accelerate.session.call import Call

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel


def step_inputs(
    model: PipelinedModel, call: Call, num_microbatches: int, groups: RowGroups = CONTIGUOUS, *, training: bool
) -> StepInputs:
    """Everything the executor needs for this call; the loss and gradients are added for each schedule."""
    demanded, conductor = model.conductor.demanded(call), model.conductor
    return StepInputs(
        microbatches=_Microbatches(call, divide(call.batch_size, num_microbatches, groups)),
        states=model.states,
        training=training,
        autocast=call.autocast,
        seed=call.seed,
        keep=lambda name: not training or call.wants_kept(name) or name in demanded or conductor.is_wanted(call, name),
    )


class _Microbatches(Sequence[MicrobatchInputs]):
    """A call's micro-batches, each made when it is first asked for: the first operation need not wait for the last."""

    def __init__(self, call: Call, rows: tuple[Microbatch, ...]) -> None:
        self._call = call
        self._rows = rows
        self._batch_dims: dict[str, int | None] = {}
        self._made: dict[int, MicrobatchInputs] = {}

    @overload
    def __getitem__(self, index: int) -> MicrobatchInputs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[MicrobatchInputs]: ...

    def __getitem__(self, index: int | slice) -> MicrobatchInputs | Sequence[MicrobatchInputs]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        made = self._made.get(index)
        if made is None:
            call, rows = self._call, self._rows[index]
            shapes = call.staged.shapes(call.micro_bindings(rows.count))
            made = self._made[index] = MicrobatchInputs(
                rows=rows,
                arguments=_Parts(call, rows, self._batch_dims),
                sizes=shapes.sizes,
                values=shapes.values,
            )
        return made

    def __len__(self) -> int:
        return len(self._rows)


class _Parts(dict[str, Any]):
    """A micro-batch's part of the call's arguments, each cut when a stage first reads it."""

    def __init__(self, call: Call, rows: Microbatch, batch_dims: dict[str, int | None]) -> None:
        super().__init__()
        self._call = call
        self._rows = rows
        self._batch_dims = batch_dims

    def __missing__(self, name: str) -> Any:
        value, dim = self._call.arguments[int(name)], self._batch_dim(name)
        part = self[name] = value if dim is None else take(value, dim, self._rows)
        return part

    def _batch_dim(self, name: str) -> int | None:
        if name not in self._batch_dims:
            graph, index = self._call.graph, int(name)
            placeholders = (p for p in graph.placeholders if p.kind is PlaceholderKind.INPUT and p.index == index)
            self._batch_dims[name] = graph.batch_dim(next(placeholders).example)
        return self._batch_dims[name]


def output_gradients(call: Call, gradients: Mapping[str, torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """Whole-batch gradients of values, cut into micro-batches; those of batch-less values are shared out."""
    cut: dict[tuple[str, int], torch.Tensor] = {}
    for name, gradient in gradients.items():
        dim = call.graph.batch_dim(call.graph.node_of[name].meta["example_value"])
        total = len(call.inputs.microbatches)
        for data in call.inputs.microbatches:
            if dim is None:
                cut[name, data.rows.index] = gradient / total
                continue
            per_item = gradient.shape[dim] // data.rows.total
            cut[name, data.rows.index] = take(gradient, dim, data.rows, per_item)
    return cut
