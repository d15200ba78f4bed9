"""One stage as a program: the fx graph of its operations, with what they read from outside as arguments.

Random operations draw from generator states of their own. Operations of a region that the model wants computed again in
the backward pass run under `torch.utils.checkpoint`, so that nothing inside it is kept.
Ignores: regions that change a tensor from outside, or whose inputs are changed after them, since computing those again
would give something else: they run once, and keep what they need.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind
from pfeife_accelerate.capture.nodes import autocast_step, inputs_of, mutates, tensors_in
from pfeife_accelerate.capture.random_operation import with_own_numbers
from pfeife_accelerate.capture.regions import Region, region_of
from pfeife_accelerate.compat import SET_GRAD_ENABLED, storage_id
from pfeife_accelerate.ir.program import InputKind, StageInput, StageProgram

__all__ = ["is_size", "make_stage"]

_SEED: Final = "micro_batch_seed"


def is_size(node: fx.Node) -> bool:
    """Whether a node's value is a number (or several) that follows from the shapes of the call."""
    return not isinstance(node.meta.get("example_value"), torch.Tensor)


def make_stage(graph: CapturedGraph, index: int, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> StageProgram:
    """The stage that runs `nodes`, which are in order, and returns the values of `outputs`."""
    maker = _Maker(graph, f"Stage{index}", nodes, outputs)
    forward = maker.make(_runs(nodes))
    inputs = [_stage_input(graph, node) for node in maker.reads]
    if maker.draws_random:
        inputs.insert(0, StageInput(kind=InputKind.SEED, name=_SEED))
    return StageProgram(index=index, run=forward, inputs=tuple(inputs), outputs=tuple(node.name for node in outputs))


def _runs(nodes: Sequence[fx.Node]) -> list[tuple[Region | None, list[fx.Node]]]:
    """Operations that follow one another in one region, or in none."""
    runs = [(region, list(run)) for region, run in groupby(nodes, key=region_of)]
    changed = [target for node in nodes if (target := mutates(node)) is not None]
    return [(region if _can_repeat(run, nodes, changed) else None, run) for region, run in runs]


def _can_repeat(run: Sequence[fx.Node], nodes: Sequence[fx.Node], changed: Sequence[fx.Node]) -> bool:
    """Whether a second execution finds what the first one found."""
    if not changed:
        return True
    own = set(run)
    outside = {s for node in run for read in inputs_of(node) if read not in own for s in _storages(read)}
    begun = False
    for node in nodes:
        begun = begun or node is run[0]
        target = mutates(node) if begun else None
        if target is not None and outside.intersection(_storages(target)):
            return False
    return True


def _storages(node: fx.Node) -> list[int]:
    return [storage_id(tensor) for tensor in tensors_in(node.meta.get("example_value"))]


class _Maker:
    """Makes the graph of some operations, of a stage or of a region in it; `reads` are the values from outside."""

    def __init__(self, graph: CapturedGraph, name: str, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        self.captured = graph
        self.name = name
        self.outputs = outputs
        own = set(nodes)
        external = dict.fromkeys(read for node in nodes for read in inputs_of(node) if read not in own)
        self.reads = [node for node in external if node.op != "get_attr"]
        self._constants = [node for node in external if node.op == "get_attr"]
        self._numbers = {node: graph.random_number[node] for node in nodes if node in graph.random_number}
        self.draws_random = bool(self._numbers)
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._seed: fx.Node | None = None

    def make(self, runs: Sequence[tuple[Region | None, list[fx.Node]]]) -> Callable[..., tuple[Any, ...]]:
        """The function: of the seed if anything draws random numbers, then of `reads`."""
        if self.draws_random:
            self._seed = self._graph.placeholder(_SEED)
        for node in self.reads:
            self._copies[node] = self._graph.placeholder(node.name)
        for node in self._constants:
            self._copies[node] = self._graph.node_copy(node)
        for number, (region, nodes) in enumerate(runs):
            if region is None:
                for node in nodes:
                    self._copies[node] = self._copy(node)
            else:
                later = {read for _, run in runs[number + 1 :] for node in run for read in inputs_of(node)}
                self._repeatable(region, nodes, [n for n in nodes if n in later or n in self.outputs], number)
        self._graph.output(tuple(self._copies[node] for node in self.outputs))
        return fx.GraphModule(self.captured.gm, self._graph, class_name=self.name).forward

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._numbers:
            return self._graph.node_copy(node, self._copies.__getitem__)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copies.__getitem__)
        draw = with_own_numbers(node, self._numbers[node])
        return self._graph.call_function(draw, (self._seed, *args), kwargs)

    def _repeatable(self, region: Region, nodes: list[fx.Node], outputs: list[fx.Node], number: int) -> None:
        inner = _Maker(self.captured, f"{self.name}Region{region.number}", nodes, outputs)
        forward = inner.make([(None, nodes)])
        seed = [self._seed] if inner.draws_random else []
        call = _computed_again(forward, region, nodes, number)
        results = self._graph.call_function(call, (*seed, *(self._copies[node] for node in inner.reads)))
        for position, node in enumerate(outputs):
            self._copies[node] = self._graph.call_function(operator.getitem, (results, position))


def _computed_again(
    forward: Callable[..., Any], region: Region, nodes: Sequence[fx.Node], number: int
) -> Callable[..., Any]:
    # A repetition that ends early, by an exception, would leave a mode switched.
    switches = any(node.target is SET_GRAD_ENABLED or autocast_step(node) for node in nodes)
    run = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, early_stop=not switches)
    if region.context_fn is not None:
        run = partial(run, context_fn=region.context_fn)

    def call(*args: Any) -> Any:
        return run(*args)

    call.__name__ = call.__qualname__ = f"region_{region.number}_run_{number}"
    return call


def _stage_input(graph: CapturedGraph, node: fx.Node) -> StageInput:
    placeholder = graph.placeholder_of.get(node)
    if placeholder is None:
        return StageInput(kind=InputKind.SIZE if is_size(node) else InputKind.VALUE, name=node.name)
    match placeholder.kind:
        case PlaceholderKind.SYMBOL:
            return StageInput(kind=InputKind.SIZE, name=node.name)
        case PlaceholderKind.STATE:
            assert placeholder.state_name is not None
            return StageInput(kind=InputKind.STATE, name=placeholder.state_name)
        case PlaceholderKind.INPUT:
            return StageInput(kind=InputKind.MODEL_INPUT, name=str(placeholder.index))
