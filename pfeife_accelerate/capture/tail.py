"""The end of a graph, which does not divide by rows, on values that the stages before have made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind

__all__ = ["replay_tail"]


def replay_tail(
    graph: CapturedGraph, arguments: tuple[Any, ...], bindings: Mapping[Any, int], value_of: Callable[[str], Any]
) -> dict[fx.Node, Any]:
    """Values of the graph's tail: its operations applied to `value_of(name)` and this call's arguments.

    What the tail reads of the inputs alone (its prologue) is computed here too, on the whole batch.
    """
    values: dict[fx.Node, Any] = {}

    def operand(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        placeholder = graph.placeholder_of.get(node)
        if placeholder is not None and placeholder.kind is PlaceholderKind.INPUT:
            return arguments[placeholder.index]
        if node.op == "get_attr":
            return graph.constant(node)
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            return graph.concrete(example, bindings)
        values[node] = value_of(node.name)
        return values[node]

    for node in graph.gm.graph.nodes:
        if node not in graph.tail and node not in graph.prologue:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        if node.op == "call_method":
            values[node] = operator.methodcaller(node.target, *args[1:], **kwargs)(args[0])
        else:
            values[node] = node.target(*args, **kwargs)
    return values
