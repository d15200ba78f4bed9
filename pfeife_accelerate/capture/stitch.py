"""Several captured pieces of one call, joined to one graph.

Every piece that Dynamo makes has size symbols of its own. The joined graph is therefore run once more on fakes of one
mode of its own, with the sizes open that were open in some piece, which gives all values their shapes in the same
symbols. What that says must agree with what each piece said, else the pieces are not joined.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pfeife_accelerate.capture.arguments import CallArguments
from pfeife_accelerate.capture.backend import Piece
from pfeife_accelerate.capture.eager_ops import EagerOp
from pfeife_accelerate.capture.fakes import fake_twin
from pfeife_accelerate.capture.graph import CapturedGraph, bind_symbols
from pfeife_accelerate.capture.sizes import bind, concrete
from pfeife_accelerate.capture.timeline import Event, Link, LinkKind, NotStitched, Timeline
from pfeife_accelerate.compat import (
    FakeTensorMode,
    expression_of,
    fake_input,
    symbolic_number,
)

_MAX_GRAPHS = 32


@dataclass(frozen=True, kw_only=True)
class Argument:
    """What one placeholder of a stitched graph is given: a state, an input, or a number that a piece was given."""

    state: str | None = None
    input: int | None = None
    number: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Stitched:
    """A joined graph, what its placeholders are given, and the timeline it was made from (which keeps ids in use)."""

    graph: CapturedGraph
    slots: tuple[Argument, ...]
    timeline: Timeline

    def arguments(self, timeline: Timeline, states: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """The graph's arguments in a call with this timeline."""
        return _arguments(self.slots, timeline, states)


class StitchCache:
    """Stitched graphs by the key of their timeline; the oldest are forgotten."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[Any, ...], Stitched] = OrderedDict()

    def find(self, key: tuple[Any, ...], timeline: Timeline, states: Mapping[str, torch.Tensor]) -> Stitched | None:
        """A graph made before, if its shapes are those of this call too."""
        found = self._made.get(key)
        if found is None or not _has_shapes(found, timeline, states):
            return None
        self._made.move_to_end(key)
        return found

    def keep(self, key: tuple[Any, ...], stitched: Stitched) -> None:
        """Remember a graph."""
        self._made[key] = stitched
        if len(self._made) > _MAX_GRAPHS:
            self._made.popitem(last=False)


def stitch(
    timeline: Timeline, states: Mapping[str, torch.Tensor], given: CallArguments, indivisible: str | None
) -> Stitched:
    """Join the events of a call; `states` are the fake twins of parameters and buffers by name.

    Raises: NotStitched if what the joined graph says of some value is not what its piece said.
    """
    joiner = _Joiner(timeline, states)
    gm = joiner.module()
    arguments = _arguments(joiner.slots, timeline, states)
    joiner.propagate(gm, arguments, given)
    joiner.check(bind(zip(joiner.examples(), arguments, strict=True)))
    names = {id(states[slot.state]): slot.state for slot in joiner.slots if slot.state is not None}
    graph = CapturedGraph.build(gm, arguments, names, given.batch_dims, indivisible or joiner.indivisible)
    return Stitched(graph=graph, slots=tuple(joiner.slots), timeline=timeline)


class _Joiner:
    """Builds one fx graph out of a timeline."""

    def __init__(self, timeline: Timeline, states: Mapping[str, torch.Tensor]) -> None:
        self.slots: list[Argument] = []
        self.indivisible: str | None = None
        self._timeline = timeline
        self._states = states
        self._root = torch.nn.Module()
        self._graph = fx.Graph()
        self._inserted_after: fx.Node | None = None
        self._placeholders: dict[Link | tuple[int, int], fx.Node] = {}
        self._open_dims: dict[fx.Node, set[int]] = {}
        self._values: list[tuple[Any, ...]] = []

    def module(self) -> fx.GraphModule:
        """The joined graph; its nodes have no example values yet."""
        for number, event in enumerate(self._timeline.events):
            if isinstance(event.source, Piece):
                self._values.append(self._copy_piece(number, event, event.source))
            else:
                self._values.append(self._add_operation(event, event.source))
        self._graph.output(tuple(self._values[link.index][link.result] for link in self._timeline.results))
        return fx.GraphModule(self._root, self._graph)

    def _copy_piece(self, number: int, event: Event, piece: Piece) -> tuple[Any, ...]:
        copies: dict[fx.Node, Any] = {}
        numbers: list[tuple[int, fx.Node]] = []
        for position, (node, link) in enumerate(zip(piece.placeholders, event.links, strict=True)):
            assert link is not None
            if link.kind is LinkKind.NUMBER:
                numbers.append((position, node))
                continue
            copies[node] = self._argument(link)
            if link.kind is LinkKind.INPUT:
                self._note_open(copies[node], piece.examples[position])
        for position, node in numbers:
            copies[node] = self._number(number, position, piece, copies)
        for node in piece.gm.graph.nodes:
            if node.op == "get_attr":
                copies[node] = self._constant(piece.gm, node)
            elif node.op not in ("placeholder", "output"):
                copies[node] = self._graph.node_copy(node, copies.__getitem__)
        return tuple(copies[value] if isinstance(value, fx.Node) else value for value in piece.results)

    def _add_operation(self, event: Event, op: EagerOp) -> tuple[Any, ...]:
        leaves = [
            leaf if link is None else self._argument(link) for leaf, link in zip(event.leaves, event.links, strict=True)
        ]
        made = op.add_to(self._graph, leaves)
        made.meta["example_value"] = None
        if not op.is_tuple:
            return (made,)
        items = tuple(self._graph.call_function(operator.getitem, (made, i)) for i in range(len(op.outputs)))
        for item in items:
            item.meta["example_value"] = None
        return items

    # ------------------------------------------------------------------ arguments

    def _argument(self, link: Link) -> fx.Node:
        if link.kind is LinkKind.RESULT:
            value: fx.Node = self._values[link.index][link.result]
            return value
        if link not in self._placeholders:
            is_state = link.kind is LinkKind.STATE
            slot = Argument(state=link.name) if is_state else Argument(input=link.index)
            self._placeholders[link] = self._placeholder(link.name if is_state else f"input_{link.index}", slot)
        return self._placeholders[link]

    def _placeholder(self, name: str, slot: Argument) -> fx.Node:
        self.slots.append(slot)
        last = self._inserted_after
        with self._graph.inserting_after(last) if last is not None else self._graph.inserting_before():
            word = "".join(c if c.isalnum() else "_" for c in name)
            node = self._graph.placeholder(f"argument_{len(self.slots)}_{word}")
        self._inserted_after = node
        return node

    def _number(self, event: int, position: int, piece: Piece, copies: Mapping[fx.Node, Any]) -> fx.Node:
        """A number that a piece was given: the size of one of its tensors if it is that, else an argument."""
        wanted = expression_of(piece.examples[position])
        for node, example in zip(piece.placeholders, piece.examples, strict=True):
            if isinstance(example, torch.Tensor) and node in copies:
                for dim, size in enumerate(example.shape):
                    if isinstance(size, torch.SymInt) and expression_of(size) == wanted:
                        found = self._graph.call_method("size", (copies[node], dim))
                        found.meta["example_value"] = None
                        return found
        self.indivisible = "a number passes from Python to a captured piece, and may depend on the batch size"
        return self._placeholder("number", Argument(number=(event, position)))

    def _note_open(self, node: fx.Node, example: torch.Tensor) -> None:
        dims = (dim for dim, size in enumerate(example.shape) if isinstance(size, torch.SymInt))
        self._open_dims.setdefault(node, set()).update(dims)

    def _constant(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        name = f"constant_{len(self._root._modules) + len(vars(self._root))}"
        setattr(self._root, name, operator.attrgetter(str(node.target))(gm))
        made = self._graph.get_attr(name)
        made.meta.update(node.meta)
        return made

    # ------------------------------------------------------------------ shapes

    def examples(self) -> list[Any]:
        """Example values of the placeholders."""
        return [node.meta["example_value"] for node in self._graph.nodes if node.op == "placeholder"]

    def propagate(self, gm: fx.GraphModule, arguments: tuple[Any, ...], given: CallArguments) -> None:
        """Give every node the value that it has for open sizes."""
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        for node, slot, argument in zip(placeholders, self.slots, arguments, strict=True):
            dims = set(self._open_dims.get(node, ()))
            if id(argument) in given.batch_dims:
                dims.add(given.batch_dims[id(argument)])
            node.meta["example_value"] = _fake_argument(mode, node.name, slot, argument, dims)
        _tie(placeholders, arguments, given)
        grad = torch.is_grad_enabled()
        try:
            with mode:
                _Propagate(gm).run(*(node.meta["example_value"] for node in placeholders))
        except Exception as error:
            raise NotStitched(f"the joined pieces do not fit together ({error})") from error
        finally:
            torch.set_grad_enabled(grad)

    def check(self, bindings: Mapping[Any, int]) -> None:
        """Compare every value that a piece returned with what the joined graph says of it."""
        for event, values in zip(self._timeline.events, self._values, strict=True):
            for value, output in zip(values, event.outputs, strict=True):
                if isinstance(output, torch.Tensor) and isinstance(value, fx.Node):
                    example = value.meta.get("example_value")
                    if _facts(example, bindings) != _facts(output, {}):
                        raise NotStitched(f"the joined pieces disagree about {value.name}")


class _Propagate(fx.Interpreter):
    """Runs a graph on fakes and notes the values where Dynamo would."""

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, noted as its example."""
        result = super().run_node(n)
        if "example_value" in n.meta:
            n.meta["example_value"] = result
        return result


def _fake_argument(mode: FakeTensorMode, name: str, slot: Argument, argument: Any, open_dims: set[int]) -> Any:
    if slot.number is not None:
        return symbolic_number(mode, argument, name)
    if slot.state is not None:
        return fake_twin(argument, mode, argument.device)
    return fake_input(mode, argument, open_dims, name)


def _tie(placeholders: Sequence[fx.Node], arguments: tuple[Any, ...], given: CallArguments) -> None:
    """Make one symbol of the numbers of rows that are known to be equal."""
    dims = {id(tensor): dim for dim, tensors in enumerate(given.tied) for tensor in tensors}
    sizes = [
        node.meta["example_value"].shape[dims[id(argument)]]
        for node, argument in zip(placeholders, arguments, strict=True)
        if id(argument) in dims
    ]
    if not all(size == sizes[0] for size in sizes):  # asking is what makes them equal
        raise NotStitched("arguments that carry the batch have different numbers of rows")


def _facts(value: Any, bindings: Mapping[Any, int]) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    return (concrete(tuple(value.shape), bindings), value.dtype, value.device, value.requires_grad)


def _arguments(slots: Sequence[Argument], timeline: Timeline, states: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    found: list[Any] = []
    for slot in slots:
        if slot.state is not None:
            found.append(states[slot.state])
        elif slot.input is not None:
            found.append(timeline.inputs[slot.input])
        elif slot.number is not None:
            event, position = slot.number
            found.append(timeline.events[event].leaves[position])
    return tuple(found)


def _has_shapes(stitched: Stitched, timeline: Timeline, states: Mapping[str, torch.Tensor]) -> bool:
    """Whether a graph that was made for another call has the shapes of this one."""
    graph, arguments = stitched.graph, stitched.arguments(timeline, states)
    bindings = bind_symbols(graph, arguments)
    for placeholder in graph.placeholders:
        argument = arguments[placeholder.index]
        if isinstance(argument, torch.Tensor) and concrete(tuple(placeholder.example.shape), bindings) != tuple(
            argument.shape
        ):
            return False
    results = [timeline.events[link.index].outputs[link.result] for link in timeline.results]
    return all(
        _facts(example, bindings) == _facts(result, {})
        for example, result in zip(graph.output_examples, results, strict=True)
    )
