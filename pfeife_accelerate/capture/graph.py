"""A captured graph, read for what pipelining needs to know about it.

What each placeholder is (a size symbol, a parameter or buffer, an input of the call), which dimension carries the
batch, where a cut is legal, and which operations mix the rows of the batch. Those last ones, with everything computed
from them, are the *tail* (typically the loss inside the model): the tail is never cut into stages but replayed with the
script's own loss operations.

Does not model: mixing that `mixing` does not know, and BatchNorm in training mode.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx

from pfeife_accelerate.capture.mixing import mixes_rows
from pfeife_accelerate.capture.nodes import (
    autocast_step,
    inputs_of,
    is_noise,
    is_training_batch_norm,
    mutates,
    source_line,
    tensors_in,
    transformed,
)
from pfeife_accelerate.capture.random_operation import draws_random
from pfeife_accelerate.capture.sizes import bind, concrete, symbols_of
from pfeife_accelerate.compat import SET_GRAD_ENABLED, expression_of, storage_id

METADATA_ONLY = frozenset(
    {"size", "dim", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "stride", "numel", "__len__"}
)
MAX_TAIL_OPS = 400


class PlaceholderKind(Enum):
    """What a graph argument is."""

    SYMBOL = "symbol"
    STATE = "state"
    INPUT = "input"


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """One graph argument: its position, what it is, and the parameter's or buffer's name if it is one."""

    node: fx.Node
    index: int
    kind: PlaceholderKind
    state_name: str | None = None

    @property
    def example(self) -> Any:
        """The value Dynamo traced with."""
        return self.node.meta.get("example_value")


@dataclass(frozen=True, kw_only=True)
class Modes:
    """Modes that operations have switched on: the nodes that entered autocast, and whether gradients are recorded."""

    autocasts: tuple[fx.Node, ...] = ()
    grad_enabled: bool = True


NO_MODES = Modes()


class CapturedGraph:
    """An fx graph at torch level with symbolic batch size; see the module's docstring."""

    def __init__(
        self,
        gm: fx.GraphModule,
        placeholders: tuple[Placeholder, ...],
        batch_symbols: frozenset[Any],
        indivisible: str | None = None,
    ) -> None:
        self.gm = gm
        self.placeholders = placeholders
        self.batch_symbols = batch_symbols
        self.placeholder_of = {p.node: p for p in placeholders}
        self.node_of = {node.name: node for node in gm.graph.nodes}
        output = next(n for n in gm.graph.nodes if n.op == "output")
        self.outputs: tuple[Any, ...] = tuple(output.args[0])
        self.output_examples = tuple(_example(value) for value in self.outputs)
        self.transformed = transformed(gm.graph)
        """What runs under `torch.vmap` or its kin: it cannot be parted, and all of it runs."""
        self.tail, self.mixing_node = self._find_tail()
        self.refusal = indivisible or self._refusal()
        if self.refusal:
            self.tail = frozenset()
        self.prologue = self._find_prologue()
        self.ops: tuple[fx.Node, ...] = tuple(
            n for n in gm.graph.nodes if n.op in ("call_function", "call_method") and n not in self.tail
        )
        self.position = {node: i for i, node in enumerate(self.ops)}
        self.random_number = {node: i for i, node in enumerate(n for n in self.ops if draws_random(n))}
        self.has_batch_statistics = any(is_training_batch_norm(node) for node in self.ops)
        self.updated_buffers = tuple(sorted({name for node in self.ops for name in self._states_changed_by(node)}))
        self._cut_allowed: tuple[bool, ...] | None = None

    @classmethod
    def build(
        cls,
        gm: fx.GraphModule,
        args: tuple[Any, ...],
        name_of: Mapping[int, str],
        batch_dims: Mapping[int, int],
        indivisible: str | None = None,
    ) -> CapturedGraph:
        """Read a graph as Dynamo gives it; `args` are the arguments of one call.

        `name_of` and `batch_dims` know arguments by `id`: which are parameters or buffers, and which dimension of an
        argument is the batch. `indivisible` says why the batch cannot be divided, if that is known.
        """
        _normalise(gm)
        placeholders: list[Placeholder] = []
        batch_symbols: set[Any] = set()
        for index, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
            example, kind, name = node.meta.get("example_value"), PlaceholderKind.INPUT, None
            if not isinstance(example, torch.Tensor):
                kind = PlaceholderKind.SYMBOL
            elif id(args[index]) in name_of:
                kind, name = PlaceholderKind.STATE, name_of[id(args[index])]
            elif (dim := batch_dims.get(id(args[index]))) is not None:
                batch_symbols |= symbols_of(example.shape[dim])
            placeholders.append(Placeholder(node=node, index=index, kind=kind, state_name=name))
        return cls(gm, tuple(placeholders), frozenset(batch_symbols), indivisible)

    @property
    def changes_buffers(self) -> bool:
        """Whether a forward leaves buffers other than it found them."""
        return self.has_batch_statistics or bool(self.updated_buffers)

    @property
    def has_open_lengths(self) -> bool:
        """Whether sizes other than the batch's are symbols: they have differed between calls."""
        return any(symbols_of(s) - self.batch_symbols for p in self.placeholders for s in _sizes(p.example))

    def concrete(self, value: Any, bindings: Mapping[Any, int]) -> Any:
        """A size, or a structure of sizes, with numbers put in for the symbols."""
        return concrete(value, bindings)

    def batch_dim(self, example: torch.Tensor) -> int | None:
        """The first dimension whose size depends on the batch size, or None."""
        for dim, size in enumerate(example.shape):
            if symbols_of(size) & self.batch_symbols:
                return dim
        return None

    def carries_batch(self, node: fx.Node) -> bool:
        """Whether some tensor in the node's value has a dimension that depends on the batch size."""
        return any(self.batch_dim(t) is not None for t in tensors_in(node.meta.get("example_value")))

    def keeps_items(self, node: fx.Node) -> bool:
        """Whether all that depends on the batch size is a multiple of it: half a batch is not a half of each part."""
        for tensor in tensors_in(node.meta.get("example_value")):
            for size in tensor.shape:
                expression = expression_of(size)
                if not expression.free_symbols or not expression.free_symbols <= self.batch_symbols:
                    continue
                one, two = (
                    expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(n))) for n in (1, 2)
                )
                if one == 0 or two != 2 * one:
                    return False
        return True

    def states_of(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the parameters and buffers that the operation reads directly."""
        found = (self.placeholder_of.get(n) for n in inputs_of(node))
        return tuple(p.state_name for p in found if p is not None and p.state_name is not None)

    def _states_changed_by(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the buffers that the operation changes in place (BatchNorm's own statistics aside)."""
        target = mutates(node)
        placeholder = self.placeholder_of.get(target) if target is not None else None
        if placeholder is None or placeholder.state_name is None:
            return ()
        return () if placeholder.state_name.endswith("num_batches_tracked") else (placeholder.state_name,)

    # ------------------------------------------------------------------ where the rows of the batch are mixed

    def _find_tail(self) -> tuple[frozenset[fx.Node], fx.Node | None]:
        depends: set[fx.Node] = set()
        tail: set[fx.Node] = set()
        first = None
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                if self.placeholder_of[node].kind is PlaceholderKind.INPUT and self.carries_batch(node):
                    depends.add(node)
                continue
            if node.op not in ("call_function", "call_method"):
                continue
            reads = inputs_of(node)
            if any(n in tail for n in reads):
                tail.add(node)
            if node.target in METADATA_ONLY or not any(n in depends for n in reads):
                continue
            if not any(True for _ in tensors_in(node.meta.get("example_value"))):
                continue
            depends.add(node)
            if node not in tail and self._mixes(node):
                tail.add(node)
                first = first or node
        return frozenset(tail), first

    def _mixes(self, node: fx.Node) -> bool:
        if not self.carries_batch(node) or not self.keeps_items(node):
            return True
        return mixes_rows(node, self.batch_dim, self._num_batch_dims)

    def _num_batch_dims(self, example: torch.Tensor) -> int:
        return sum(bool(symbols_of(size) & self.batch_symbols) for size in example.shape)

    def _find_prologue(self) -> frozenset[fx.Node]:
        """What the tail reads of the call's inputs alone (shifted labels, masks): constants to the loss."""
        pure: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            placeholder = self.placeholder_of.get(node)
            if placeholder is not None:
                if placeholder.kind is not PlaceholderKind.STATE:
                    pure.add(node)
                continue
            is_plain = node.op in ("call_function", "call_method") and not draws_random(node) and mutates(node) is None
            is_plain = is_plain and node not in self.transformed
            if is_plain and all(n in pure or n.op == "get_attr" for n in inputs_of(node)):
                pure.add(node)
        wanted: set[fx.Node] = set()
        stack = [read for node in self.tail for read in inputs_of(node)]
        while stack:
            node = stack.pop()
            if node in pure and node not in wanted and node.op != "placeholder":
                wanted.add(node)
                stack += inputs_of(node)
        return frozenset(wanted)

    def _refusal(self) -> str | None:
        """Why this graph's batch cannot be split into micro-batches, or None if it can."""
        if not self.batch_symbols:
            return "the model's code fixes the batch size while it is captured"
        where = source_line(self.mixing_node) if self.mixing_node is not None else ""
        if len(self.tail) > MAX_TAIL_OPS:
            return f"an operation mixes the rows of the batch in the middle of the model ({where})"
        if any(self.states_of(n) for n in self.tail):
            return f"an operation with parameters follows one that mixes the rows of the batch ({where})"
        if self.tail & self.transformed:
            return f"a transformed function (torch.vmap or its kin) runs on what mixes the rows of the batch ({where})"
        changed = [n for n in self.tail if (target := mutates(n)) is not None and target not in self.tail]
        if changed:
            return f"forward changes a buffer by a value made of the whole batch ({source_line(changed[0])})"
        return None

    # ------------------------------------------------------------------ where it may be cut

    @property
    def cut_allowed(self) -> tuple[bool, ...]:
        """For each operation: may a stage begin with it?"""
        if self._cut_allowed is None:
            self._cut_allowed = self._legal_cuts()
        return self._cut_allowed

    def _legal_cuts(self) -> tuple[bool, ...]:
        last_use = self.last_use()
        blocked = [0] * (len(self.ops) + 1)

        def block(begin: int, end: int) -> None:  # positions begin < p <= end are illegal
            if end > begin:
                blocked[begin + 1] += 1
                if end + 1 < len(blocked):
                    blocked[end + 1] -= 1

        first_of_storage: dict[int, int] = {}
        for i, node in enumerate(self.ops):
            if i and node in self.transformed and self.ops[i - 1] in self.transformed:
                block(i - 1, i)
            example = node.meta.get("example_value")
            if not isinstance(example, torch.Tensor | torch.SymInt | int | torch.Size | None):
                block(i, last_use.get(node, i))
            for storage in _storages(example):
                first_of_storage.setdefault(storage, i)
            target = mutates(node)
            if target is not None and target in self.position:
                for storage in _storages(target.meta.get("example_value")):
                    block(first_of_storage.get(storage, i), i)
        running, legal = 0, []
        for i in range(len(self.ops)):
            running += blocked[i]
            legal.append(running == 0 and i > 0)
        return tuple(legal)

    def modes_at(self, position: int) -> Modes:
        """The modes in which the operation at a position runs."""
        autocasts: list[fx.Node] = []
        grad_enabled = True
        for node in self.ops[:position]:
            if node.target is SET_GRAD_ENABLED:
                grad_enabled = bool(node.args[0])
            step = autocast_step(node)
            if step > 0:
                autocasts.append(node)
            elif step < 0:
                autocasts.remove(node.args[0])  # type: ignore[arg-type]
        return Modes(autocasts=tuple(autocasts), grad_enabled=grad_enabled)

    def results(self) -> tuple[fx.Node, ...]:
        """Output nodes of the model, each once."""
        return tuple(dict.fromkeys(n for n in self.outputs if isinstance(n, fx.Node)))

    def result_names(self) -> tuple[str, ...]:
        """Values that leave the stages: the outputs outside the tail, and what the tail reads."""
        wanted = [n for n in self.results() if n not in self.tail]
        reads = [read for node in self.gm.graph.nodes if node in self.tail for read in inputs_of(node)]
        wanted += [n for n in reads if n not in self.prologue]
        return tuple(n.name for n in dict.fromkeys(wanted) if n in self.position and _is_tensor(n))

    def constant(self, node: fx.Node) -> Any:
        """The tensor behind a `get_attr` node."""
        return operator.attrgetter(str(node.target))(self.gm)

    def last_use(self) -> dict[fx.Node, int]:
        """Position of the last operation that reads each operation's value."""
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.ops):
            for read in inputs_of(node):
                last[read] = i
        return last


def bind_symbols(graph: CapturedGraph, args: tuple[Any, ...]) -> dict[Any, int]:
    """Values of the graph's size symbols in a call with these arguments."""
    return bind((placeholder.example, args[placeholder.index]) for placeholder in graph.placeholders)


def _example(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _sizes(example: Any) -> tuple[Any, ...]:
    return tuple(example.shape) if isinstance(example, torch.Tensor) else (example,)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _storages(example: Any) -> list[int]:
    return [storage_id(t) for t in tensors_in(example)]


def _must_stay(node: fx.Node) -> bool:
    """Whether a node counts even if nobody reads its value: it changes something, or switches a mode."""
    return node.op in ("placeholder", "output") or mutates(node) is not None or "example_value" not in node.meta


def _normalise(gm: fx.GraphModule) -> None:
    """Drop bookkeeping calls, and pull each tuple's `getitem` readers directly behind it so that a cut can follow."""
    for node in list(gm.graph.nodes):
        if is_noise(node) and not node.users:
            gm.graph.erase_node(node)
    for node in list(gm.graph.nodes):
        if not isinstance(node.meta.get("example_value"), tuple | list) or isinstance(
            node.meta.get("example_value"), torch.Size
        ):
            continue
        anchor = node
        for user in list(node.users):
            if user.op == "call_function" and user.target is operator.getitem and isinstance(user.args[1], int):
                anchor.append(user)
                anchor = user
    within = transformed(gm.graph)
    gm.graph.eliminate_dead_code(lambda node: node in within or _must_stay(node))
    gm.recompile()
