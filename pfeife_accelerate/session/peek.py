"""A value that the model's own Python reads in the middle of its forward: had by running what is captured so far.

Models: a branch on a value. Every rank's Python reads it, so all ranks run the part of the graph before it, over the
pipeline, as an evaluation; the call itself then runs the whole graph of the branch that was taken. Random operations
draw what they will draw then, and buffers are left as they were.
Ignores: the cost, which is one more forward up to the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.random_operation import own_generators
from pfeife_accelerate.session.buffers import unchanged
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.outputs import output_values
from pfeife_accelerate.session.randomness import return_seed, take_seed

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel


def peek(
    model: PipelinedModel,
    graph: CapturedGraph,
    arguments: tuple[Any, ...],
    bindings: Mapping[Any, int],
    precision: tuple[str, torch.dtype] | None,
) -> torch.Tensor:
    """The value of the graph's only output, on every rank."""
    seed = 0
    if graph.random_number:
        seed = take_seed()
        return_seed()  # the call itself will take it
    with torch.inference_mode(False), torch.no_grad():
        if model.plan is None:
            return _whole(model, graph, arguments, seed)
        call = Call(model.conductor.next_number(), model, graph, arguments, bindings, precision)
        call.seed = seed
        model.session.batch_check.show(call)
        model.conductor.register(call, training=False)
        with unchanged(call, model.placement.placed_buffers):
            model.evaluate(call)
        if call.alone:
            return _whole(model, graph, arguments, seed)
        return output_values(call)[graph.outputs[0]]  # type: ignore[no-any-return]


def _whole(model: PipelinedModel, graph: CapturedGraph, arguments: tuple[Any, ...], seed: int) -> torch.Tensor:
    """By this rank alone: before the model is placed, or where no other rank's script makes the call."""
    values = list(arguments)
    for placeholder in graph.placeholders:
        if placeholder.state_name is not None:
            state = model.capture.states()[placeholder.state_name].detach()
            values[placeholder.index] = state.to(model.device, copy=True)  # forward may change buffers
    with own_generators(seed, model.device):
        return graph.gm(*values)[0]  # type: ignore[no-any-return]
