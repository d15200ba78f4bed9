"""What a call gives the script: deferred outputs in training, values in evaluation.

The model's own loss operations, its graph's tail, are recorded as if the script had written them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pfeife_accelerate.capture.model_capture import CapturedCall
from pfeife_accelerate.capture.tail import replay_tail
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.session.call import Call


def deferred_outputs(call: Call) -> Callable[[int], Any]:
    """Output by number, in training."""
    graph = call.graph
    outputs = set(graph.results()) & graph.tail
    tail = replay_tail(graph, call.arguments, call.bindings, call.deferred) if outputs else {}

    def output(index: int) -> Any:
        node = graph.outputs[index]
        return tail[node] if node in outputs else call.deferred(node.name)

    return output


def output_values(call: Call) -> Mapping[Any, Any]:
    """Output by graph node, once an evaluation has run."""
    with torch.no_grad():
        tail = replay_tail(call.graph, call.arguments, call.bindings, call.values.__getitem__)
    values = call.values
    return {n: tail[n] if n in call.graph.tail else values[n.name] for n in call.graph.results()}


def refuse_loss_of_inputs(captured: CapturedCall) -> None:
    """The model's own loss is computed with the script's, where an argument is a constant.

    Raises: PfeifeError PF511 if a gradient would have to flow from it into an argument.
    """
    graph = captured.graph
    for link in captured.links:
        node, argument = graph.placeholders[link.index].node, captured.arguments[link.index]
        if any(user in graph.tail or user in graph.prologue for user in node.users):
            raise PfeifeError(
                id="PF511",
                what="the model's own loss reads one of its arguments directly, and a gradient must flow into it "
                f"(shape {tuple(argument.shape)}, {argument.dtype})",
                why="gradients reach arguments through the model's stages, not through its loss",
                hints=("compute this loss term outside the model", "pass the argument detached"),
            )
