"""The recorded expression behind a deferred scalar, taken out of the deferred tensors: leaves, constants, steps.

An expression can be replayed on real tensors (the whole batch, exactly as the script wrote it) and has a signature:
two steps of the script that do the same thing on tensors of the same shapes have equal signatures, so what was worked
out for one serves the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf, Operation, Record
from pfeife_accelerate.capture.records import records_in
from pfeife_accelerate.capture.torch_functions import mapped, name_of, telling


class Origin(Enum):
    """Where an operand comes from."""

    LEAF = "leaf"
    CONSTANT = "constant"
    NUMBER = "number"
    STEP = "step"


@dataclass(frozen=True)
class Operand:
    """An operand of a step: which leaf, constant, number, or output of an earlier step."""

    origin: Origin
    index: int
    output: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """One operation with `Operand`s in place of tensors."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Expression:
    """What a deferred scalar is made of. `scalars` are all one-element values in it, the differentiated one first."""

    leaves: tuple[Record, ...]
    constants: tuple[torch.Tensor, ...]
    numbers: tuple[float, ...]
    """Factors and terms written as Python floats: a script may change them at each step (an annealed weight)."""
    steps: tuple[Step, ...]
    scalars: tuple[tuple[Operand, Record], ...]
    counts: tuple[torch.Tensor, ...]
    """Constants used as an index that are 0, 1, 2, ...: `torch.arange(batch_size)`."""
    signature: Hashable

    @property
    def leaf_info(self) -> tuple[Leaf, ...]:
        """The leaves' descriptions, in order."""
        return tuple(record.leaf for record in self.leaves if record.leaf is not None)

    @property
    def kind(self) -> Hashable:
        """What is computed, whatever the shapes and the numbers in it."""
        leaves = tuple(
            (leaf.batch_dim is None, record.fake.dim())
            for leaf, record in zip(self.leaf_info, self.leaves, strict=True)
        )
        return leaves, tuple((name_of(s.operation.func), _operands(s.args), _operands(s.kwargs)) for s in self.steps)

    @property
    def root(self) -> Operand:
        """The differentiated value."""
        return self.scalars[0][0]

    def replay(
        self,
        leaves: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
        before_step: Callable[[str, str], None] | None = None,
        numbers: Sequence[float] | None = None,
    ) -> list[torch.Tensor]:
        """Values of `scalars` for these leaves and constants, with autograd if it is enabled.

        `numbers` stand in for the expression's own. `before_step` is told each step's function and script line before
        it runs.
        """
        results: list[list[Any]] = []
        floats = self.numbers if numbers is None else numbers

        def operand(item: Any) -> Any:
            if not isinstance(item, Operand):
                return item
            match item.origin:
                case Origin.LEAF:
                    return leaves[item.index]
                case Origin.CONSTANT:
                    return constants[item.index]
                case Origin.NUMBER:
                    return floats[item.index]
                case Origin.STEP:
                    return results[item.index][item.output]

        for step in self.steps:
            args, kwargs = mapped((step.args, step.kwargs), operand)
            if before_step is not None:
                before_step(name_of(step.operation.func), step.operation.where)
            results.append(step.operation.run(args, kwargs))
        return [operand(scalar) for scalar, _ in self.scalars]


def _operands(structure: Any) -> tuple[Operand, ...]:
    found: list[Operand] = []
    mapped(structure, lambda item: found.append(item) if isinstance(item, Operand) else None)
    return tuple(found)


_ARITHMETIC = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "true_divide", "truediv", "radd", "rsub", "rmul", "rdiv", "rtruediv")
    for prefix, suffix in (("", ""), ("__", "__"))
)
_INDEXING = frozenset(("__getitem__", "index_select"))


def extract(root: DeferredTensor) -> Expression:
    """The expression behind `root`, with steps in the order in which they were recorded."""
    return _Extraction().run(root.record)


class _Extraction:
    def __init__(self) -> None:
        self.leaves: dict[int, tuple[int, Record]] = {}
        self.constants: dict[int, tuple[int, torch.Tensor]] = {}
        self.steps: list[Step] = []
        self.signatures: list[Hashable] = []
        self.index_of_operation: dict[int, int] = {}
        self.scalars: dict[int, tuple[Operand, Record]] = {}
        self.numbers: list[float] = []
        self.counts: set[int] = set()
        self.indices: list[torch.Tensor] = []
        self.same: dict[int, torch.Tensor] = {}

    def run(self, root: Record) -> Expression:
        for operation in _in_order(root):
            operation.check_unchanged()
            if name_of(operation.func) in _INDEXING:
                mapped((operation.args, operation.kwargs), self._note_index)
            args, kwargs = mapped((operation.args, operation.kwargs), self._operand)
            if name_of(operation.func) in _ARITHMETIC:
                args = tuple([self._number(arg) if type(arg) is float else arg for arg in args])
            self.index_of_operation[id(operation)] = len(self.steps)
            self.steps.append(Step(operation, args, kwargs))
            self.signatures.append(_signature(operation, args, kwargs))
        scalars = [(self._reference(root), root)]
        scalars += [pair for pair in self.scalars.values() if pair[1] is not root]
        leaves = tuple(record for _, record in self.leaves.values())
        constants = tuple(constant for _, constant in self.constants.values())
        signature = (
            tuple(self.signatures),
            tuple(
                (str(_leaf(r).value), _leaf(r).batch_dim, _leaf(r).rows_per_item, *_metadata(r.fake)) for r in leaves
            ),
            tuple(_metadata(c) for c in constants),
            tuple(operand for operand, _ in scalars),
            tuple(i for i, c in enumerate(constants) if id(c) in self.counts),
        )
        counts = tuple(c for c in constants if id(c) in self.counts)
        numbers = tuple(self.numbers)
        return Expression(leaves, constants, numbers, tuple(self.steps), tuple(scalars), counts, signature)

    def _operand(self, item: Any) -> Any:
        if isinstance(item, Record):
            return self._reference(item)
        if isinstance(item, torch.Tensor):
            item = self.same.get(id(item), item)
            index, _ = self.constants.setdefault(id(item), (len(self.constants), item))
            return Operand(Origin.CONSTANT, index)
        return item

    def _number(self, value: float) -> Operand:
        self.numbers.append(value)
        return Operand(Origin.NUMBER, len(self.numbers) - 1)

    def _note_index(self, item: Any) -> None:
        """Equal positions count as one constant: the same mask is written as indices anew each time it is used."""
        if not isinstance(item, torch.Tensor) or item.dtype is not torch.int64 or item.dim() != 1:
            return
        for known in self.indices:
            if known.device == item.device and torch.equal(known, item):
                self.same[id(item)] = known
                return
        self.indices.append(item)
        if torch.equal(item, torch.arange(item.numel(), device=item.device)):
            self.counts.add(id(item))

    def _reference(self, record: Record) -> Operand:
        if record.operation is None:
            index, _ = self.leaves.setdefault(id(record.leaf), (len(self.leaves), record))
            return Operand(Origin.LEAF, index)
        operand = Operand(Origin.STEP, self.index_of_operation[id(record.operation)], record.index)
        if record.fake.numel() == 1:
            self.scalars.setdefault(id(record), (operand, record))
        return operand


def _leaf(record: Record) -> Leaf:
    assert record.leaf is not None
    return record.leaf


def _in_order(root: Record) -> list[Operation]:
    """Operations behind a record, each after those it reads (iterative depth-first search)."""
    order: list[Operation] = []
    done: set[int] = set()
    stack: list[tuple[Record, bool]] = [(root, False)]
    while stack:
        record, expanded = stack.pop()
        operation = record.operation
        if operation is None or id(operation) in done:
            continue
        if expanded:
            done.add(id(operation))
            order.append(operation)
            continue
        stack.append((record, True))
        stack += [(read, False) for read in reversed(records_in((operation.args, operation.kwargs)))]
    return order


def _metadata(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad


def _signature(operation: Operation, args: Any, kwargs: Any) -> Hashable:
    func = operation.func
    name = (getattr(func, "__module__", None), getattr(func, "__qualname__", None), name_of(func))
    draws = operation.draw is not None
    told = telling((args, kwargs), _unknown, lambda tensor: ("tensor", object()))
    return name, told, operation.grad_enabled, operation.autocast, draws


def _unknown(item: Any) -> Hashable:
    # Of anything else nothing is known: no other step is like this one.
    return item if isinstance(item, Operand) else (type(item).__qualname__, object())
