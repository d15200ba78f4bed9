"""Values that every reading stage may compute anew instead of being sent them: masks, rotary tables, positions.

Models: what follows from the call's arguments, from buffers, constants and sizes alone, by operations that draw no
random numbers and change nothing. A value's *cone* is all that is computed to get it.
Ignores: what it costs, which the plan weighs; and what a region or a transformed function computes, which is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind
from pfeife_accelerate.capture.nodes import (
    inputs_of,
    is_training_batch_norm,
    mutates,
    source_line,
    target_name,
    tensors_in,
)
from pfeife_accelerate.capture.regions import region_of
from pfeife_accelerate.compat import storage_id

__all__ = ["alike", "cone", "copyable"]


def copyable(graph: CapturedGraph, changed_buffers: Iterable[str] = ()) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """The operations whose value may be computed anew, with their cones in order, themselves included.

    `changed_buffers` are buffers that other graphs of the model change: they are right on their own ranks alone.
    """
    changed_here = _changed_storages(graph)
    changed_elsewhere = frozenset(changed_buffers)
    good: set[fx.Node] = set()
    for placeholder in graph.placeholders:
        example = placeholder.example
        is_state = placeholder.kind is PlaceholderKind.STATE
        if is_state and (isinstance(example, nn.Parameter) or placeholder.state_name in changed_elsewhere):
            continue
        if not _is_touched(example, changed_here):
            good.add(placeholder.node)
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.ops:
        reads = inputs_of(node)
        if _is_number(node):
            good.add(node)  # follows from the shapes of the call
        elif _is_plain(graph, node, changed_here) and all(read in good or _is_constant(graph, read) for read in reads):
            good.add(node)
            if isinstance(node.meta["example_value"], torch.Tensor):
                found[node] = cone(graph, node)
    return found


def cone(graph: CapturedGraph, node: fx.Node) -> tuple[fx.Node, ...]:
    """The operations that an operation's value is made by, in order, itself included; sizes aside."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in graph.position and current not in found and not _is_number(current):
            found.add(current)
            stack += inputs_of(current)
    return tuple(sorted(found, key=graph.position.__getitem__))


def alike(planned: CapturedGraph, names: Iterable[str], graph: CapturedGraph) -> tuple[str, ...]:
    """The operations of another graph of the same model that come from the same source lines as those named."""
    wanted = {_origin(planned.node_of[name]) for name in names}
    return tuple(node.name for node in graph.ops if _origin(node) in wanted)


def _origin(node: fx.Node) -> tuple[str, str | None]:
    return target_name(node), source_line(node)


def _is_plain(graph: CapturedGraph, node: fx.Node, changed: set[int]) -> bool:
    example = node.meta.get("example_value")
    return (
        any(True for _ in tensors_in(example))
        and not _is_touched(example, changed)
        and node not in graph.random_number
        and node not in graph.transformed
        and mutates(node) is None
        and region_of(node) is None
        and not target_name(node).startswith(("empty", "new_empty"))  # whatever is in memory
    )


def _is_touched(example: Any, changed: set[int]) -> bool:
    """Whether a value needs a gradient, or is changed in place by some operation."""
    return any(tensor.requires_grad or storage_id(tensor) in changed for tensor in tensors_in(example))


def _is_number(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return example is not None and not any(True for _ in tensors_in(example))


def _is_constant(graph: CapturedGraph, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(graph.constant(node), torch.Tensor)


def _changed_storages(graph: CapturedGraph) -> set[int]:
    targets = [target for node in graph.gm.graph.nodes if (target := mutates(node)) is not None]
    targets += [read for node in graph.ops if is_training_batch_norm(node) for read in inputs_of(node)[1:]]
    return {storage_id(t) for target in targets for t in tensors_in(target.meta.get("example_value"))}
