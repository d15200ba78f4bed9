"""A model's operations in execution order, and what crosses each position between two of them.

Models: who reads what, parameter use and tying, sizes of values.
Ignores: what the operations compute, and values that are no tensors (an operation without `outputs`): they have no
size and are never sent; capture keeps them with their readers or repeats them. Graph outputs are not reads: an output
nobody asks for is not sent.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir.tensors import TensorSpec

__all__ = ["OpGraph", "OpNode"]


@dataclass(frozen=True, kw_only=True)
class OpNode:
    """One operation. `inputs` names the operations, graph inputs and parameters it reads."""

    index: int
    name: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    params: tuple[str, ...] = ()
    source_line: str | None = None
    cut_allowed: bool = True  #: whether a cut directly before this operation is legal

    @property
    def num_bytes(self) -> int:
        """Size of everything it produces, in bytes."""
        return sum(spec.num_bytes for spec in self.outputs)

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients that flow back to what it produces, in bytes."""
        return sum(spec.num_bytes for spec in self.outputs if spec.requires_grad)


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """Operations in a topological order. A *position* p lies directly before operation p; `len(nodes)` is the end."""

    nodes: tuple[OpNode, ...]
    inputs: tuple[tuple[str, TensorSpec], ...] = ()
    outputs: tuple[str, ...] = ()
    params: tuple[tuple[str, TensorSpec], ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()  #: groups of names of one and the same parameter

    def __post_init__(self) -> None:
        """Refuse an order in which something is read before it exists."""
        known = {name for name, _ in self.inputs} | {name for name, _ in self.params}
        for position, node in enumerate(self.nodes):
            missing = [name for name in node.inputs if name not in known]
            if node.index != position or node.name in known or missing:
                raise InternalError(
                    id="PF151",
                    what=f"operation {node.name!r} at position {position} is out of order",
                    where=node.source_line,
                    why=f"index {node.index}, unknown inputs {missing}, or a name used twice",
                )
            known.add(node.name)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the structure; source lines do not count, they differ between machines."""
        text = json.dumps(
            {
                "nodes": [
                    (n.name, n.target, n.inputs, [_plain(s) for s in n.outputs], n.params, n.cut_allowed)
                    for n in self.nodes
                ],
                "inputs": [(name, _plain(spec)) for name, spec in self.inputs],
                "outputs": self.outputs,
                "params": [(name, _plain(spec)) for name, spec in self.params],
                "tied": self.tied,
            },
            sort_keys=True,
            separators=(",", ":"),
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Position of each operation by name."""
        return {node.name: node.index for node in self.nodes}

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the positions of those that read it, increasing, each once."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                producer = self.index_of.get(name)
                if producer is not None:
                    found[producer].append(node.index)
        return tuple(tuple(reads) for reads in found)

    def crossing(self, position: int) -> tuple[str, ...]:
        """Names of values produced before `position` and read at or after it, in order of production."""
        return tuple(
            node.name
            for node, reads in zip(self.nodes[:position], self.readers, strict=False)
            if reads and reads[-1] >= position
        )

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """For each position 0..len(nodes): bytes of the values that cross it."""
        return self._crossing_sums(tuple(node.num_bytes for node in self.nodes))

    @cached_property
    def crossing_gradient_bytes(self) -> tuple[int, ...]:
        """For each position 0..len(nodes): bytes of the gradients that cross it backwards."""
        return self._crossing_sums(tuple(node.gradient_bytes for node in self.nodes))

    def _crossing_sums(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        # A value of operation i crosses positions i+1 .. last reader: two marks each, then one running sum.
        change = [0] * (len(self.nodes) + 2)
        for index, (size, reads) in enumerate(zip(sizes, self.readers, strict=True)):
            if reads:
                change[index + 1] += size
                change[reads[-1] + 1] -= size
        return tuple(accumulate(change[: len(self.nodes) + 1]))

    @cached_property
    def owner_of(self) -> dict[str, str]:
        """For each parameter name, the first name of its tied group: one storage, one name."""
        owners = {name: name for name, _ in self.params}
        for group in self.tied:
            owners.update(dict.fromkeys(group, group[0]))
        return owners

    @cached_property
    def param_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name."""
        return dict(self.params)


def _plain(spec: TensorSpec) -> tuple[tuple[int, ...], str, bool]:
    return spec.shape, spec.dtype, spec.requires_grad
