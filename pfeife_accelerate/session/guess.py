"""What a step will differentiate, guessed from the last step, so that a value read before `backward` is had from the
planned schedule.

Models: a script whose step does what its last step did, with other data: the loss so far is taken from what has been
recorded, the rest (a division by accumulation steps, a loss scale) is recorded once more as it was last time. When
`backward` comes, every rank holds the real expression against the guess, and all come to the same verdict.
Ignores: losses over several calls, and what is drawn at random after the read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from pfeife_accelerate.capture.deferred import DeferredTensor, Record
from pfeife_accelerate.capture.expression import Expression, Operand, Origin, Step, extract
from pfeife_accelerate.capture.recording import record_call
from pfeife_accelerate.capture.torch_functions import mapped, name_of
from pfeife_accelerate.compat import pytree

if TYPE_CHECKING:
    from pfeife_accelerate.session.call import Call

_SMALL_NUMEL = 64
_MOST_WRONG = 2
_REGAINED = 0.01


@dataclass(frozen=True, kw_only=True)
class Guess:
    """What was differentiated before the script asked: a digest of the expression and of its `unseen` constants."""

    digest: str
    unseen: tuple[int, ...]

    def to_json(self) -> list[Any]:
        """As a part of a message."""
        return [self.digest, list(self.unseen)]

    @classmethod
    def from_json(cls, body: Any) -> Guess:
        """From a message."""
        return cls(digest=str(body[0]), unseen=tuple(int(i) for i in body[1]))

    def fits(self, expression: Expression) -> bool:
        """Whether the expression is the one that was guessed."""
        return _digest(expression, self.unseen) == self.digest


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A guessed expression of the present step, on the present step's tensors."""

    expression: Expression
    guess: Guess


@dataclass(frozen=True, kw_only=True)
class _Template:
    """The last step's expression without its data; `recorded` lists its steps in the order in which they were made."""

    steps: tuple[Step, ...]
    recorded: tuple[int, ...]
    leaves: tuple[str, ...]
    constants: tuple[torch.Tensor | None, ...]
    numbers: tuple[float, ...]
    root: Operand


class Foresight:
    """What one model's steps have differentiated, and whether guessing has been worth it."""

    def __init__(self) -> None:
        self._template: _Template | None = None
        self._doubt = 0.0
        self._unused = 0
        self._last: ref[Call] | None = None

    def learn(self, expression: Expression, *, was_wrong: bool) -> None:
        """A step has differentiated this; `was_wrong`: something else had been guessed."""
        self._doubt = self._doubt + 1 if was_wrong else max(0.0, self._doubt - _REGAINED)
        self._unused, self._last = 0, None
        self._template = _template(expression)

    def expects(self, call: Call) -> bool:
        """Whether the script is likely to differentiate a loss of this call."""
        last = self._last() if self._last is not None else call
        if last is not call:
            # No backward came for what was guessed: an evaluation with gradients enabled.
            self._unused, self._last = self._unused + 1, None
        is_trusted = self._doubt < _MOST_WRONG and self._unused < _MOST_WRONG
        return self._template is not None and is_trusted and call.asked == 0

    def predict(self, call: Call) -> Prediction | None:
        """What this call's loss will be; None if that cannot be told, or was wrong too often."""
        prediction = None
        if self._template is not None and self.expects(call):
            prediction = _Match(self._template, call).complete()
        self._last = ref(call) if prediction is not None else None
        return prediction


def _template(expression: Expression) -> _Template | None:
    steps = expression.steps
    if any(constant.requires_grad for constant in expression.constants) or "<object object" in repr(
        expression.signature
    ):
        return None
    return _Template(
        steps=tuple(Step(step.operation.without_data(), step.args, step.kwargs) for step in steps),
        recorded=tuple(sorted(range(len(steps)), key=lambda i: steps[i].operation.number)),
        leaves=tuple(leaf.value for leaf in expression.leaf_info),
        constants=tuple(c.detach().clone() if c.numel() <= _SMALL_NUMEL else None for c in expression.constants),
        numbers=expression.numbers,
        root=expression.root,
    )


class _Match:
    """Pairs the template's steps with what the script has recorded from a call so far."""

    def __init__(self, template: _Template, call: Call) -> None:
        self._template = template
        self._call = call
        self._made: dict[int, dict[int, Record]] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._unseen: set[int] = set()

    def complete(self) -> Prediction | None:
        """The whole expression: what is recorded, and the rest as it was last time."""
        candidates = self._candidates()
        missing = []
        for index in self._template.recorded:
            step = self._template.steps[index]
            found = next((c for c in candidates.get(_kind(step), ()) if self._fits(step, c)), None)
            if found is None:
                missing.append(index)
                continue
            candidates[_kind(step)].remove(found)
            self._made[index] = found
        if not all(self._repeat(index) for index in missing):
            return None
        root = self._operand(self._template.root)
        if not isinstance(root, DeferredTensor):
            return None
        expression = extract(root)
        places = tuple(i for i, constant in enumerate(expression.constants) if id(constant) in self._unseen)
        return Prediction(expression=expression, guess=Guess(digest=_digest(expression, places), unseen=places))

    def _candidates(self) -> dict[Hashable, list[dict[int, Record]]]:
        """Results by operation, operations by kind, in the order in which they were recorded."""
        by_operation: dict[int, dict[int, Record]] = {}
        for reference in self._call.recorded:
            record = reference()
            if record is not None and record.operation is not None:
                by_operation.setdefault(record.operation.number, {})[record.index] = record
        found: dict[Hashable, list[dict[int, Record]]] = {}
        for results in by_operation.values():
            operation = next(iter(results.values())).operation
            assert operation is not None
            found.setdefault(_kind(Step(operation, (), {})), []).append(results)
        return found

    def _fits(self, step: Step, results: dict[int, Record]) -> bool:
        operation = next(iter(results.values())).operation
        assert operation is not None
        expected, given = _flat((step.args, step.kwargs)), _flat((operation.args, operation.kwargs))
        if len(expected) != len(given):
            return False
        bound: dict[int, torch.Tensor] = {}
        if not all(self._equal(e, g, bound) for e, g in zip(expected, given, strict=True)):
            return False
        self._constants.update(bound)
        return True

    def _equal(self, expected: Any, given: Any, bound: dict[int, torch.Tensor]) -> bool:
        if not isinstance(expected, Operand):
            return type(expected) is type(given) and bool(expected == given)
        match expected.origin:
            case Origin.CONSTANT:
                if not isinstance(given, torch.Tensor):
                    return False
                known = self._constants.get(expected.index, bound.setdefault(expected.index, given))
                return known is given
            case Origin.NUMBER:
                return type(given) is float
            case Origin.LEAF:
                leaf = given.leaf if isinstance(given, Record) else None
                return leaf is not None and leaf.value == self._template.leaves[expected.index]
            case Origin.STEP:
                return isinstance(given, Record) and self._made.get(expected.index, {}).get(expected.output) is given

    def _repeat(self, index: int) -> bool:
        """Record a step as it was last time. False if it needs what is not there."""
        step = self._template.steps[index]
        operation = step.operation
        if operation.draw is not None:
            return False
        args, kwargs = mapped((step.args, step.kwargs), self._operand)
        if any(item is _MISSING for item in _flat((args, kwargs))):
            return False
        with torch.set_grad_enabled(operation.grad_enabled), torch.autocast(*operation.autocast):
            result = record_call(operation.func, args, kwargs)
        leaves = pytree.tree_leaves(result)
        records = [leaf.record for leaf in leaves if isinstance(leaf, DeferredTensor)]
        if len(records) != len(leaves) or not records:
            return False
        made = records[0].operation
        self._made[index] = {record.index: record for record in records}
        self._unseen.update(
            id(item) for item in _flat((made.args, made.kwargs) if made else ()) if isinstance(item, torch.Tensor)
        )
        self._unseen.difference_update(id(constant) for constant in self._constants.values())
        return True

    def _operand(self, item: Any) -> Any:
        if not isinstance(item, Operand):
            return item
        match item.origin:
            case Origin.CONSTANT:
                last = self._template.constants[item.index]
                return self._constants.get(item.index, _MISSING if last is None else last)
            case Origin.NUMBER:
                return self._template.numbers[item.index]
            case Origin.LEAF:
                name = self._template.leaves[item.index]
                return self._call.deferred(name) if name in self._call.graph.node_of else _MISSING
            case Origin.STEP:
                record = self._made.get(item.index, {}).get(item.output)
                return _MISSING if record is None else DeferredTensor.make(record)


_MISSING = object()


def _kind(step: Step) -> Hashable:
    operation = step.operation
    return name_of(operation.func), operation.grad_enabled, operation.autocast, operation.draw is not None


def _flat(structure: Any) -> list[Any]:
    found: list[Any] = []
    mapped(structure, found.append)
    return found


def _digest(expression: Expression, places: Sequence[int]) -> str:
    told = repr((expression.signature, expression.numbers))
    found = hashlib.blake2b(told.encode(), digest_size=16)
    for place in places:
        if place >= len(expression.constants) or expression.constants[place].numel() > _SMALL_NUMEL:
            return ""
        found.update(repr(expression.constants[place].tolist()).encode())
    return found.hexdigest()
