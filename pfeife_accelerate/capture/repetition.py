"""Whether a stage may run twice on one micro-batch, and which of what it reads must be as before the second time.

Models: buffers and arguments of the call that any operation of the model changes in place, here or in another stage,
for this micro-batch or the next.
Ignores: state that an operator of another library keeps to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind
from pfeife_accelerate.capture.nodes import inputs_of, is_training_batch_norm, mutates, tensors_in
from pfeife_accelerate.compat import storage_id

__all__ = ["changing_reads", "is_repeatable"]


def changing_reads(graph: CapturedGraph, nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """What the operations read from outside the graph and an operation of the model changes in place."""
    statistics = {r for n in graph.ops if is_training_batch_norm(n) for r in inputs_of(n) if _is_buffer(graph, r)}
    changed = _changed(graph)
    reads = {read for node in nodes for read in inputs_of(node) if read in graph.placeholder_of}
    return frozenset(read for read in reads if read in statistics or changed.intersection(_storages(read)))


def is_repeatable(graph: CapturedGraph, nodes: Sequence[fx.Node]) -> bool:
    """Whether a second run, given copies of what changes, computes the same as the first.

    It would not if a copy were to receive a gradient, or if two of what changes shared memory.
    """
    changed = _changed(graph)
    constants = {read for node in nodes for read in inputs_of(node) if read.op == "get_attr"}
    if any(changed.intersection(storage_id(t) for t in tensors_in(graph.constant(read))) for read in constants):
        return False
    storages: set[int] = set()
    for read in changing_reads(graph, nodes):
        own = set(_storages(read))
        if read.meta["example_value"].requires_grad or own & storages:
            return False
        storages |= own
    return True


def _changed(graph: CapturedGraph) -> frozenset[int]:
    return frozenset(s for node in graph.ops if (target := mutates(node)) is not None for s in _storages(target))


def _is_buffer(graph: CapturedGraph, node: fx.Node) -> bool:
    placeholder = graph.placeholder_of.get(node)
    is_state = placeholder is not None and placeholder.kind is PlaceholderKind.STATE
    return is_state and not node.meta["example_value"].requires_grad


def _storages(node: fx.Node) -> list[int]:
    return [storage_id(tensor) for tensor in tensors_in(node.meta.get("example_value"))]
