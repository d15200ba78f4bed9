"""One stage as a program: the fx graph of its operations, with what they read from outside as arguments.

A stage that begins or ends within an autocast or no_grad region enters and leaves it for its part.
Random operations draw from generator states of their own. Operations of a region that the model wants computed again in
the backward pass run under `torch.utils.checkpoint`, so that nothing inside it is kept.
Ignores: regions that change a value from outside, or whose inputs are changed after them, since computing those again
would give something else: they run once, and keep what they need, as does a part that begins or ends within an autocast
of its region. Buffers are changed once.
A stage of a plan that splits backwards leaves weight gradients for later where it can; one that recomputes its
activations has a first run that records nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from typing import Any, Final

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from pfeife_accelerate.capture.compiled import Compilation, opaque
from pfeife_accelerate.capture.fused_accumulation import accumulating_linear
from pfeife_accelerate.capture.graph import NO_MODES, CapturedGraph, Modes, PlaceholderKind
from pfeife_accelerate.capture.nodes import autocast_step, inputs_of, is_training_batch_norm, mutates, tensors_in
from pfeife_accelerate.capture.random_operation import with_own_numbers
from pfeife_accelerate.capture.regions import Region, region_of
from pfeife_accelerate.capture.repetition import changing_reads, is_repeatable
from pfeife_accelerate.capture.weight_gradients import adds_in_product, putting_off, weights_of
from pfeife_accelerate.compat import AUTOCAST_EXIT, SET_GRAD_ENABLED, storage_id
from pfeife_accelerate.ir.program import InputKind, Repetition, StageInput, StageProgram

__all__ = ["is_size", "make_stage"]

_SEED: Final = "micro_batch_seed"
_LATER: Final = "weight_gradients_for_later"


def is_size(node: fx.Node) -> bool:
    """Whether a node's value is a number (or several) that follows from the shapes of the call."""
    return not isinstance(node.meta.get("example_value"), torch.Tensor)


def make_stage(
    graph: CapturedGraph,
    index: int,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    begin: Modes = NO_MODES,
    end: Modes = NO_MODES,
    anew: Sequence[fx.Node] = (),
    *,
    puts_off: bool = False,
    repeats: bool = False,
    compilation: Compilation | None = None,
) -> StageProgram:
    """The stage that runs `nodes`, which are in order, and returns the values of `outputs`.

    `begin` and `end` are the modes before its first and after its last operation. `anew` are operations of other
    stages, in order, that it repeats first, each in its own modes. `puts_off`: weight gradients are left for later.
    `repeats`: the activations are to be recomputed; where that would give something else, they are not.
    """
    how = partial(_Maker, graph, f"Stage{index}", nodes, outputs, begin, end, anew, compilation=compilation)
    make = partial(how, puts_off=puts_off)
    maker, runs = make(), _runs(graph, nodes)
    forward = maker.make(runs)
    inputs = [_stage_input(graph, node) for node in maker.reads]
    if maker.puts_off:
        inputs.insert(0, StageInput(kind=InputKind.LATER, name=_LATER))
    if maker.draws_random:
        inputs.insert(0, StageInput(kind=InputKind.SEED, name=_SEED))
    repetition = None
    if repeats and is_repeatable(graph, nodes):
        before = len(inputs) - len(maker.reads)
        changing = changing_reads(graph, nodes)
        repetition = Repetition(
            forward=make(records=False).make(runs) if _switches_gradients(nodes, begin) else forward,
            changing=tuple(before + i for i, node in enumerate(maker.reads) if node in changing),
        )
    return StageProgram(
        index=index,
        run=forward,
        inputs=tuple(inputs),
        outputs=tuple(node.name for node in outputs),
        repetition=repetition,
    )


def _switches_gradients(nodes: Sequence[fx.Node], begin: Modes) -> bool:
    return not begin.grad_enabled or any(node.target is SET_GRAD_ENABLED for node in nodes)


def _runs(graph: CapturedGraph, nodes: Sequence[fx.Node]) -> list[_Run]:
    """Operations that follow one another in one region, or in none."""
    changed = [(i, target) for i, node in enumerate(nodes) if (target := mutates(node)) is not None]
    statistics = {read for node in nodes if is_training_batch_norm(node) for read in inputs_of(node)}
    found, begin = [], 0
    for region, members in groupby(nodes, key=region_of):
        run = list(members)
        buffers: list[fx.Node] = []
        if sum(map(autocast_step, run)) != 0:  # cut within a mode: what follows needs what entered it
            region = None
        if region is not None:
            own = set(run)
            later = {s for i, target in changed if i >= begin for s in _storages(target)}
            outside = dict.fromkeys(read for node in run for read in inputs_of(node) if read not in own)
            touched = [read for read in outside if read in statistics or later.intersection(_storages(read))]
            buffers = [read for read in touched if _is_buffer(graph, read)]
            if any(read not in buffers and later.intersection(_storages(read)) for read in touched):
                region = None
        found.append(_Run(region=region, nodes=run, buffers=frozenset(buffers)))
        begin += len(run)
    return found


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Operations to be computed again together, if `region` is given; `buffers` are those that the stage changes."""

    region: Region | None
    nodes: list[fx.Node]
    buffers: frozenset[fx.Node] = frozenset()


def _is_buffer(graph: CapturedGraph, node: fx.Node) -> bool:
    placeholder = graph.placeholder_of.get(node)
    is_state = placeholder is not None and placeholder.kind is PlaceholderKind.STATE
    return is_state and not node.meta["example_value"].requires_grad


def _storages(node: fx.Node) -> list[int]:
    return [storage_id(tensor) for tensor in tensors_in(node.meta.get("example_value"))]


class _Maker:
    """Makes the graph of some operations, of a stage or of a region in it; `reads` are the values from outside."""

    def __init__(
        self,
        graph: CapturedGraph,
        name: str,
        nodes: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        begin: Modes = NO_MODES,
        end: Modes = NO_MODES,
        anew: Sequence[fx.Node] = (),
        *,
        compilation: Compilation | None = None,
        puts_off: bool = False,
        records: bool = True,
    ) -> None:
        self.captured = graph
        self._compilation = compilation
        self._nodes = nodes
        self._begin = begin
        self._end = end
        self.name = name
        self.outputs = outputs
        self._anew = anew
        own = {*nodes, *anew, *begin.autocasts}
        external = dict.fromkeys(read for node in (*anew, *nodes) for read in inputs_of(node) if read not in own)
        self.reads = [node for node in external if node.op != "get_attr"]
        self._constants = [node for node in external if node.op == "get_attr"]
        self._numbers = {node: graph.random_number[node] for node in nodes if node in graph.random_number}
        self.draws_random = bool(self._numbers)
        self._weights = {node: weights for node in nodes if puts_off and (weights := weights_of(graph, node))}
        self.puts_off = bool(self._weights)
        self._records = records
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._seed: fx.Node | None = None
        self._later: fx.Node | None = None

    def make(self, runs: Sequence[_Run]) -> Callable[..., tuple[Any, ...]]:
        """The function: of the seed if anything draws random numbers, of the list for later if anything is put off,
        then of `reads`.
        """
        if self.draws_random:
            self._seed = self._graph.placeholder(_SEED)
        if self.puts_off:
            self._later = self._graph.placeholder(_LATER)
        for node in self.reads:
            self._copies[node] = self._graph.placeholder(node.name)
        for node in self._constants:
            self._copies[node] = self._graph.node_copy(node)
        self._repeat(self._anew)
        for node in self._begin.autocasts:
            self._copies[node] = self._graph.node_copy(node)
        if not self._begin.grad_enabled and self._records:
            self._graph.call_function(SET_GRAD_ENABLED, (False,))
        for number, run in enumerate(runs):
            if run.region is None:
                for node in run.nodes:
                    if self._records or node.target is not SET_GRAD_ENABLED:
                        self._copies[node] = self._copy(node)
            else:
                later = {read for other in runs[number + 1 :] for node in other.nodes for read in inputs_of(node)}
                self._repeatable(run, [n for n in run.nodes if n in later or n in self.outputs], number)
        for node in reversed(self._end.autocasts):  # who runs the stage restores the gradient mode
            self._graph.call_function(AUTOCAST_EXIT, (self._copies[node],))
        self._graph.output(tuple(self._copies[node] for node in self.outputs))
        forward = fx.GraphModule(self.captured.gm, self._graph, class_name=self.name).forward
        if self._compilation is None or not self._nodes:
            return forward
        graph = self.captured
        return self._compilation.function(
            forward, self._nodes, self.name, seeds=int(self.draws_random), any_sizes=graph.has_open_lengths
        )

    def _repeat(self, nodes: Sequence[fx.Node]) -> None:
        graph = self.captured
        for autocasts, group in groupby(nodes, key=lambda node: graph.modes_at(graph.position[node]).autocasts):
            entered = [self._graph.node_copy(node) for node in autocasts]
            for node in group:
                self._copies[node] = self._copy(node)
            for mode in reversed(entered):
                self._graph.call_function(AUTOCAST_EXIT, (mode,))

    def _copy(self, node: fx.Node) -> fx.Node:
        if node in self._weights:
            call, reads = putting_off(node, self._weights[node])
            return self._graph.call_function(call, (self._later, *(self._copies[read] for read in reads)))
        if self._compilation is None and adds_in_product(self.captured, node):
            return self._graph.call_function(accumulating_linear, fx.map_arg(node.args, self._copies.__getitem__))
        if node not in self._numbers:
            return self._graph.node_copy(node, self._copies.__getitem__)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copies.__getitem__)
        draw = with_own_numbers(node, self._numbers[node])
        return self._graph.call_function(self._opaque(draw), (self._seed, *args), kwargs)

    def _opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._compilation is None else opaque(function)

    def _repeatable(self, run: _Run, outputs: list[fx.Node], number: int) -> None:
        assert run.region is not None
        # What a context of the model's own is to see are the operations themselves.
        how = self._compilation if run.region.context_fn is None else None
        name = f"{self.name}Run{number}"
        inner = _Maker(self.captured, name, run.nodes, outputs, compilation=how, records=self._records)
        forward = inner.make([_Run(region=None, nodes=run.nodes)])
        seed = [self._seed] if inner.draws_random else []
        buffers = [len(seed) + i for i, node in enumerate(inner.reads) if node in run.buffers]
        call = _computed_again(forward, run, buffers, number)
        results = self._graph.call_function(self._opaque(call), (*seed, *(self._copies[node] for node in inner.reads)))
        for position, node in enumerate(outputs):
            self._copies[node] = self._graph.call_function(operator.getitem, (results, position))


def _computed_again(forward: Callable[..., Any], run: _Run, buffers: Sequence[int], number: int) -> Callable[..., Any]:
    """A function that does what `forward` does, and keeps its arguments alone for the backward pass.

    `buffers` are the positions of arguments that change: every repetition finds them as they were.
    """
    # A repetition that ends early, by an exception, would leave a mode switched.
    switches = any(node.target is SET_GRAD_ENABLED or autocast_step(node) for node in run.nodes)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": not switches}
    if run.region is not None and run.region.context_fn is not None:
        options["context_fn"] = run.region.context_fn

    def call(*args: Any) -> Any:
        before = {position: args[position].clone() for position in buffers}
        times = count()

        def once(*given: Any) -> Any:
            if next(times) > 0:
                given = tuple(before[i].clone() if i in before else value for i, value in enumerate(given))
            return forward(*given)

        return checkpoint(once, *args, **options)

    call.__name__ = call.__qualname__ = f"region_run_{number}"
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
