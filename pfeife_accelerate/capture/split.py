"""Cut a captured graph into stages.

A stage holds the operations between two cuts that its readers need. Sizes that cross a cut are computed anew from the
micro-batch's shapes, never sent, and so are the values that the plan has copied. Parameters, buffers and the call's
inputs are arguments by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import fx

from pfeife_accelerate.capture.copied import cone
from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.nodes import inputs_of, mutates
from pfeife_accelerate.capture.stage import is_size, make_stage
from pfeife_accelerate.ir.program import InputKind, StageProgram, ValueInfo

_MOST_KNOWN = 256
"""Micro-batches' shapes that are kept: of a few sizes of micro-batch at each of many sequence lengths."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of one micro-batch: the numbers that stages take as arguments, and the values that leave their stage."""

    sizes: Mapping[str, Any]
    values: Mapping[str, ValueInfo]


@dataclass(frozen=True, kw_only=True)
class StagedGraph:
    """A captured graph in stages: the programs, and for each value that leaves its stage who makes and who reads it."""

    graph: CapturedGraph
    stages: tuple[StageProgram, ...]
    producer_of: Mapping[str, int]
    readers_of: Mapping[str, tuple[int, ...]]
    _known: dict[tuple[tuple[Any, int], ...], Shapes] = field(default_factory=dict, repr=False, compare=False)

    def shapes(self, bindings: Mapping[Any, int]) -> Shapes:
        """All sizes and shapes of a micro-batch whose size symbols have these values; worked out once."""
        key = tuple(bindings.items())
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = Shapes(sizes=self.sizes(bindings), values=self.values(bindings))
        return self._known[key]

    def sizes(self, bindings: Mapping[Any, int]) -> dict[str, Any]:
        """Values of all SIZE arguments for a micro-batch whose size symbols have these values."""
        wanted = {i.name for stage in self.stages for i in stage.inputs if i.kind is InputKind.SIZE}
        nodes = self.graph.node_of
        return {name: self.graph.concrete(nodes[name].meta["example_value"], bindings) for name in wanted}

    def stages_that_read(self, argument: int) -> tuple[int, ...]:
        """Stages that read the call's argument of this number."""
        wanted = InputKind.MODEL_INPUT, str(argument)
        return tuple(s.index for s in self.stages if any((i.kind, i.name) == wanted for i in s.inputs))

    def values(self, bindings: Mapping[Any, int]) -> dict[str, ValueInfo]:
        """Shapes and dtypes of all values that leave their stage."""
        return {name: value_info(self.graph, name, bindings) for name in self.producer_of}


def value_info(graph: CapturedGraph, name: str, bindings: Mapping[Any, int]) -> ValueInfo:
    """Shape, dtype and gradient flag of one value for given sizes."""
    example = graph.node_of[name].meta["example_value"]
    return ValueInfo(
        shape=graph.concrete(tuple(example.shape), bindings), dtype=example.dtype, requires_grad=example.requires_grad
    )


def split(
    graph: CapturedGraph,
    cuts: Sequence[int],
    needed: Iterable[str],
    *,
    copied: Iterable[str] = (),
    puts_off: bool = False,
    recompute: Collection[int] = (),
    make: Callable[..., StageProgram] = make_stage,
) -> StagedGraph:
    """Stages of `graph` between `cuts`; `needed` are the values wanted from outside (by the loss, or by the script).

    `copied` are values that each stage computes anew. `recompute` are the stages to compute their activations again.
    `puts_off`: the others leave weight gradients for later; these would have to keep what they computed again until
    then. `make` makes a stage, as `make_stage` does.
    """
    bounds = (0, *cuts, len(graph.ops))
    stage_of = {node: s for s, (lo, hi) in enumerate(pairwise(bounds)) for node in graph.ops[lo:hi]}
    wanted = [graph.node_of[name] for name in dict.fromkeys(needed)]
    copies = {graph.node_of[name] for name in copied}
    live = _live(graph, wanted, stage_of, copies)
    anew: list[set[fx.Node]] = [set() for _ in range(len(bounds) - 1)]
    for node in live:
        for read in inputs_of(node):
            if read in copies and stage_of[read] != stage_of[node]:
                anew[stage_of[node]].update(cone(graph, read))
    leaving: dict[fx.Node, set[int]] = {node: set() for node in wanted if node in stage_of}
    for node in live:
        for read in inputs_of(node):
            is_there = read in stage_of and stage_of[read] != stage_of[node] and read not in anew[stage_of[node]]
            if is_there and not is_size(read):
                leaving.setdefault(read, set()).add(stage_of[node])
    stages = []
    for index, (lo, hi) in enumerate(pairwise(bounds)):
        nodes = [n for n in graph.ops[lo:hi] if n in live]
        outputs = [n for n in nodes if n in leaving]
        again, first = index in recompute, sorted(anew[index], key=graph.position.__getitem__)
        modes = graph.modes_at(lo), graph.modes_at(hi)
        made = make(graph, index, nodes, outputs, *modes, first, puts_off=puts_off and not again, repeats=again)
        stages.append(made)
    return StagedGraph(
        graph=graph,
        stages=tuple(stages),
        producer_of={node.name: stage_of[node] for node in leaving},
        readers_of={node.name: tuple(sorted(readers)) for node, readers in leaving.items()},
    )


def _live(
    graph: CapturedGraph, wanted: Sequence[fx.Node], stage_of: Mapping[fx.Node, int], copies: set[fx.Node]
) -> set[fx.Node]:
    """Operations that the wanted values need, and those that change something (running statistics).

    What only other stages read of `copies`, they compute.
    """
    live: set[fx.Node] = set()
    stack = [n for n in wanted if n in graph.position] + [
        n for n in graph.ops if n in graph.transformed or _has_effect(n)
    ]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            reads = [n for n in inputs_of(node) if n in graph.position]
            stack += [n for n in reads if n not in copies or stage_of[n] == stage_of[node]]
    return live


def _has_effect(node: fx.Node) -> bool:
    target = mutates(node)
    return target is not None or node.meta.get("example_value") is None
