"""The two graphs of a loss that is split over micro-batches, being built: constants (whole batch) and micro-batch.

Also what every rule needs: a traced node's name, shape, arguments by name, and the same operation on the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_operands import (
    ConstantOperand,
    CutOperand,
    InsideOperand,
    ItemsOperand,
    Operand,
    OwnedOperand,
    PlacesOperand,
    taken,
)
from pfeife_accelerate.capture.loss_states import PARTIAL, Refused, State, StateKind, Window
from pfeife_accelerate.compat import OpOverload, schema_of
from pfeife_accelerate.ir.row_groups import RowGroups


class LossBuilder:
    """Builds the two graphs; maps traced whole-batch nodes to nodes of the one or the other."""

    def __init__(self, batch_size: int, groups: RowGroups) -> None:
        self.everything = Window(tuple(groups.group_of(row, batch_size) for row in range(batch_size)))
        self.constant_graph = fx.Graph()
        self.micro_graph = fx.Graph()
        self.states: dict[fx.Node, State] = {}
        self.constants: dict[fx.Node, fx.Node] = {}
        self.micro: dict[fx.Node, fx.Node] = {}
        self.pieces: dict[fx.Node, list[tuple[fx.Node, State]]] = {}
        """Results of operations that cut along the batch: one micro-batch node for each."""
        self.exported: dict[fx.Node, int] = {}
        self.operands: dict[Operand, fx.Node] = {}
        self.counts: set[fx.Node] = set()
        """Constants that are 0, 1, 2, ... at every step."""
        self.suggested: list[RowGroups] = []
        """Groups of rows that the script seems to treat together."""
        self._last_placeholder: fx.Node | None = None

    def suggest(self, parts: int, run: int) -> None:
        """Note how the script divides the batch."""
        self.suggested.append(RowGroups(parts=parts, run=run))

    def is_constant(self, value: Any) -> bool:
        """Whether a traced node depends on constants alone."""
        return isinstance(value, fx.Node) and value in self.constants

    def state(self, node: fx.Node) -> State:
        """State of a traced node that depends on the pipeline."""
        if node not in self.states:
            raise refusal(node)
        return self.states[node]

    def leaf(self, node: fx.Node, state: State) -> None:
        """A value that the pipeline computes becomes an input of the micro graph."""
        self._last_placeholder = self.micro[node] = self.micro_graph.placeholder(node.name)
        self.states[node] = state

    def whole(self, node: fx.Node) -> fx.Node:
        """A constant in the micro graph, as it is."""
        return self._place(ConstantOperand(self.export(node)))

    def cut(self, node: fx.Node, state: State) -> fx.Node:
        """A constant, or what is the same for every micro-batch, cut to the micro-batch's rows."""
        if not 0 <= state.dim < len(shape(node)) or shape(node)[state.dim] != state.extent:
            raise refusal(node)
        if not self.is_constant(node):
            if self.state(node).kind is not StateKind.REPLICATED:
                raise refusal(node)
            return self.emit(taken, self.micro[node], state.dim, self._place(InsideOperand(state.window, state.rows)))
        return self._place(CutOperand(self.export(node), state))

    def items(self, window: Window) -> fx.Node:
        """How many items of the window are in the micro-batch."""
        return self._place(ItemsOperand(window))

    def fraction(self, window: Window) -> fx.Node:
        """Which part of the window's items is in the micro-batch."""
        return self._place(ItemsOperand(window, fraction=True))

    def places(self, window: Window, items: range | tuple[int, ...], rows: int = 1) -> fx.Node:
        """Where, in the micro-batch's part of the window, those of these items are that it has."""
        return self._place(PlacesOperand(window, items, rows))

    def picked_places(self, window: Window, picks: fx.Node) -> fx.Node:
        """The same for items that a constant tells, always as a tensor."""
        return self._place(PlacesOperand(window, self.export(picks)))

    def part(self, node: fx.Node, state: State, refused_by: fx.Node) -> fx.Node:
        """The micro-batch's part of a value that is split as `state` says, or whole on every micro-batch."""
        if self.is_constant(node) or self.state(node).kind is StateKind.REPLICATED:
            return self.cut(node, state)
        if self.state(node) != state:
            raise refusal(refused_by)
        return self.micro[node]

    def same(self, node: fx.Node, refused_by: fx.Node) -> fx.Node:
        """A value that every micro-batch has as a whole."""
        if not self.is_constant(node) and self.state(node).kind is not StateKind.REPLICATED:
            raise refusal(refused_by)
        return self.whole(node) if self.is_constant(node) else self.micro[node]

    def owned(self, group: int) -> fx.Node:
        """Whether the micro-batch has this group of rows."""
        return self._place(OwnedOperand(group))

    @contextmanager
    def as_partial(self, nodes: Iterable[fx.Node]) -> Iterator[None]:
        """Owned values among the nodes seen as partial ones: zero for the micro-batches that do not have them."""
        kept = {n: (self.states[n], self.micro[n]) for n in nodes if self.states[n].kind is StateKind.OWNED}
        for n, (state, micro) in kept.items():
            value = n.meta["val"]
            self.states[n] = PARTIAL
            self.micro[n] = self.emit(
                value_or_zero, self.owned(state.group), micro, list(value.shape), value.dtype, value.device
            )
        try:
            yield
        finally:
            for n, (state, micro) in kept.items():
                self.states[n], self.micro[n] = state, micro

    def operand(self, value: Any) -> Any:
        """Any argument in the micro graph, constants as they are."""
        if not isinstance(value, fx.Node):
            return value
        if self.is_constant(value):
            return self.whole(value)
        if value not in self.micro:
            raise refusal(value)
        return self.micro[value]

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation to the micro graph."""
        return self.micro_graph.call_function(target, args, kwargs)

    def emit_constant(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Add an operation on traced constants to the constant graph; the result counts as a traced constant."""
        mapped = fx.map_arg(args, lambda n: self.constants.get(n, n))
        node = self.constant_graph.call_function(target, mapped)
        self.constants[node] = node
        return node

    def export(self, node: fx.Node) -> int:
        """Number of a constant among the results of the constant graph."""
        return self.exported.setdefault(self.constants[node], len(self.exported))

    def _place(self, operand: Operand) -> fx.Node:
        if operand not in self.operands:
            assert self._last_placeholder is not None
            with self.micro_graph.inserting_after(self._last_placeholder):
                self._last_placeholder = self.micro_graph.placeholder(f"operand_{len(self.operands)}")
            self.operands[operand] = self._last_placeholder
        return self.operands[operand]


def value_or_zero(
    owned: bool, value: torch.Tensor | None, shape: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An owned value as the micro-batch's term of a sum."""
    return value if owned and value is not None else torch.zeros(shape, dtype=dtype, device=device)


Result = tuple[fx.Node, State]
Rule = Callable[[LossBuilder, fx.Node], Result]


def name(node: fx.Node) -> str:
    """`operator.overload` of an ATen operation, else the function's name."""
    if isinstance(node.target, OpOverload):
        return str(node.target).removeprefix("aten.")
    return str(getattr(node.target, "__name__", node.target))


def shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of a traced whole-batch tensor."""
    value = node.meta.get("val")
    if isinstance(value, float):
        return ()
    if not isinstance(value, torch.Tensor):
        raise refusal(node)
    return tuple(value.shape)


def refusal(node: fx.Node) -> Refused:
    """The exception that says that the loss does not split because of this node."""
    return Refused(name(node), node.meta.get("where", ""))


def arguments(node: fx.Node) -> dict[str, Any]:
    """A traced node's arguments by the names in its schema, with defaults."""
    assert isinstance(node.target, OpOverload)
    schema = schema_of(node.target).arguments
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    found.update(zip((a.name for a in schema), node.args, strict=False))
    found.update(node.kwargs)
    return found


def words(names: str) -> list[str]:
    """The names of operations in a text."""
    return names.split()


def dims_of(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions as non-negative numbers; none named means all."""
    if dims is None or dims == []:
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in ([dims] if isinstance(dims, int) else dims))


def emit_same(b: LossBuilder, node: fx.Node, state: State) -> Result:
    """The same operation on the micro-batch's operands, constants as they are."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), b.operand)
    return b.emit(node.target, *args, **kwargs), state  # type: ignore[arg-type]


def source_of(b: LossBuilder, node: fx.Node) -> tuple[fx.Node, State]:
    """The first argument, which must depend on the pipeline, and its state."""
    first = node.args[0]
    if not isinstance(first, fx.Node) or b.is_constant(first):
        raise refusal(node)
    return first, b.state(first)
