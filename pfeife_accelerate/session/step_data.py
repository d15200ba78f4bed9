"""The data of a step out of a call: arguments cut into micro-batches, sizes and shapes for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    with torch.set_grad_enabled(training):  # arguments that need a gradient get it through their parts
        microbatches = tuple(_microbatch(call, rows) for rows in divide(call.batch_size, num_microbatches, groups))
    return StepInputs(
        microbatches=microbatches,
        states=model.states,
        training=training,
        autocast=call.autocast,
        seed=call.seed,
        keep=lambda name: not training or call.wants_kept(name) or name in demanded or conductor.is_wanted(call, name),
    )


def _microbatch(call: Call, rows: Microbatch) -> MicrobatchInputs:
    arguments: dict[str, Any] = {}
    for placeholder in call.graph.placeholders:
        if placeholder.kind is not PlaceholderKind.INPUT:
            continue
        value = call.arguments[placeholder.index]
        dim = call.graph.batch_dim(placeholder.example)
        if dim is not None:
            value = take(value, dim, rows)
        arguments[str(placeholder.index)] = value
    bindings = call.micro_bindings(rows.count)
    return MicrobatchInputs(
        rows=rows, arguments=arguments, sizes=call.staged.sizes(bindings), values=call.staged.values(bindings)
    )


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
