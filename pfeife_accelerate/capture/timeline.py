"""One call of a model as a sequence of captured pieces and eager operations, with links from results to arguments.

Models: which result of which event each argument is, or which parameter, buffer or input of the call. Equal timelines
have equal keys, whatever tensors they ran on. Ignores: what the events compute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from pfeife_accelerate.capture.backend import Piece, PieceCall
from pfeife_accelerate.capture.eager_ops import EagerOp
from pfeife_accelerate.compat import FakeTensor


class NotStitched(Exception):
    """Why the pieces of a call cannot be joined."""


class LinkKind(Enum):
    """Where an argument of an event comes from."""

    STATE = "a parameter or buffer"
    INPUT = "an input of the call"
    RESULT = "a result of an earlier event"
    NUMBER = "a number"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One argument's origin: a state by name, an input by number, or a result by event and position."""

    kind: LinkKind
    name: str = ""
    index: int = 0
    result: int = 0


@dataclass(frozen=True, kw_only=True)
class Event:
    """A captured piece or an eager operation, and where its arguments come from (None: a constant)."""

    source: Piece | EagerOp
    links: tuple[Link | None, ...]
    leaves: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two events the same."""
        if isinstance(self.source, Piece):
            return (id(self.source), self.links)
        constants = tuple(repr(v) for v, link in zip(self.leaves, self.links, strict=True) if link is None)
        return (self.source.kind, self.source.target, self.links, constants, tuple(self.source.kwargs))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The events of one call, its inputs in order of use, and the results that the model returns."""

    events: tuple[Event, ...]
    inputs: tuple[torch.Tensor, ...]
    results: tuple[Link, ...]
    result_ids: tuple[int, ...]

    def key(self, batch_dims: Mapping[int, int]) -> tuple[Any, ...]:
        """Equal for calls that can share one stitched graph."""
        dims = tuple(batch_dims.get(id(tensor)) for tensor in self.inputs)
        return (tuple(event.key for event in self.events), self.results, dims)

    def pattern(self, batch_dims: Mapping[int, int]) -> tuple[Any, ...]:
        """Equal for calls that differ in the number of rows only, if Python has not read that number."""
        without = tuple(tuple(t.shape) for t in self.inputs if id(t) not in batch_dims)
        return (self.key(batch_dims), without)

    def fixed_by_python(self, rows: int) -> str | None:
        """Why Python between the pieces may depend on the number of rows, or None."""
        for event in self.events:
            if isinstance(event.source, Piece):
                results = zip(event.source.result_examples, event.outputs, strict=True)
                if any(isinstance(example, torch.SymInt) and value % rows == 0 for example, value in results):
                    return "a size of the batch passes through Python code between two captured pieces"
        return None


class TimelineReader:
    """Reads what was recorded of one call."""

    def __init__(self, name_of: Mapping[int, str], differentiable: Collection[int] = ()) -> None:
        """`name_of` knows parameters and buffers by `id`, `differentiable` the inputs that a gradient flows into."""
        self._name_of = name_of
        self._differentiable = differentiable
        self._links: dict[int, Link] = {}
        self._inputs: list[torch.Tensor] = []

    def read(self, calls: Sequence[PieceCall], ops: Sequence[EagerOp], returned: Sequence[torch.Tensor]) -> Timeline:
        """The timeline of a call that made these pieces and operations and returned these tensors.

        Raises: NotStitched if some argument comes from nowhere.
        """
        wanted = _needed(calls, ops, returned)
        events: list[Event] = []
        done = 0
        for call in calls:
            self._add_ops(events, ops[done : call.ops_before], wanted)
            done = call.ops_before
            self._add(events, call.piece, call.args, call.outputs)
        self._add_ops(events, ops[done:], wanted)
        made = [tensor for tensor in returned if self._is_made(tensor)]
        return Timeline(
            events=tuple(events),
            inputs=tuple(self._inputs),
            results=tuple(self._links[id(tensor)] for tensor in made),
            result_ids=tuple(id(tensor) for tensor in made),
        )

    def _add_ops(self, events: list[Event], ops: Iterable[EagerOp], wanted: set[int]) -> None:
        for op in ops:
            if id(op) in wanted:
                if op.problem is not None:
                    raise NotStitched(op.problem)
                self._add(events, op, tuple(op.leaves), op.outputs)

    def _add(self, events: list[Event], source: Piece | EagerOp, leaves: tuple[Any, ...], outputs: Any) -> None:
        is_piece = isinstance(source, Piece)
        links = tuple(self._link(leaf, numbers=is_piece) for leaf in leaves)
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                self._links[id(output)] = Link(kind=LinkKind.RESULT, index=len(events), result=position)
        events.append(Event(source=source, links=links, leaves=leaves, outputs=tuple(outputs)))

    def _link(self, leaf: Any, *, numbers: bool) -> Link | None:
        if not isinstance(leaf, torch.Tensor):
            return Link(kind=LinkKind.NUMBER) if numbers else None
        if id(leaf) in self._links:
            return self._links[id(leaf)]
        if id(leaf) in self._name_of:
            return Link(kind=LinkKind.STATE, name=self._name_of[id(leaf)])
        if isinstance(leaf, FakeTensor):
            raise NotStitched("a value is computed by code that was not captured")
        if isinstance(leaf, nn.Parameter) or (leaf.requires_grad and id(leaf) not in self._differentiable):
            raise NotStitched("a parameter is used that the module does not hold as a parameter of its own")
        self._inputs.append(leaf)
        link = self._links[id(leaf)] = Link(kind=LinkKind.INPUT, index=len(self._inputs) - 1)
        return link

    def _is_made(self, tensor: torch.Tensor) -> bool:
        link = self._links.get(id(tensor))
        if link is None and isinstance(tensor, FakeTensor):
            raise NotStitched("the model returns a value that was not captured")
        return link is not None and link.kind is LinkKind.RESULT


def _needed(calls: Sequence[PieceCall], ops: Sequence[EagerOp], returned: Sequence[torch.Tensor]) -> set[int]:
    """The operations (by `id`) whose results a piece reads or the model returns; Dynamo itself looks at fakes too."""
    maker = {id(tensor): op for op in ops for tensor in op.outputs if isinstance(tensor, torch.Tensor)}
    stack = [arg for call in calls for arg in call.args if isinstance(arg, torch.Tensor)] + list(returned)
    needed: set[int] = set()
    known = {id(output) for call in calls for output in call.outputs}
    while stack:
        tensor = stack.pop()
        op = maker.get(id(tensor))
        if op is not None and id(op) not in needed and id(tensor) not in known:
            needed.add(id(op))
            stack += [leaf for leaf in op.leaves if isinstance(leaf, torch.Tensor)]
    return needed
