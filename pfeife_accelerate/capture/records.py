"""What deferred tensors stand for: values of the pipeline and recorded operations; how their values are computed.

Ignores: which calls of a script become operations; see `deferred`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.outcomes import Metadata
from pfeife_accelerate.capture.torch_functions import mapped
from pfeife_accelerate.compat import pytree
from pfeife_accelerate.errors import PfeifeError

if TYPE_CHECKING:
    from pfeife_accelerate.capture.deferred import DeferredTensor


class PipelinedCall(Protocol):
    """One call of a pipelined model, as far as its deferred outputs need to know."""

    @property
    def differentiable(self) -> bool:
        """Whether this rank's script may still call `backward` through this call; must change on all ranks alike."""

    def note(self, record: Record) -> None:
        """Something was computed from the call's outputs."""


class Resolver(Protocol):
    """Whoever can compute deferred values: the engine of a pipelined model."""

    def bring(self, leaf: Leaf) -> None:
        """Run what the leaf's value needs; that may make other values known too."""

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        """The leaf's whole-batch value, on this rank."""

    def backward(self, loss: DeferredTensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
        """Differentiate a deferred scalar."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A value computed by the pipeline in one call of the model.

    `batch_dim` is the dimension that carries the batch (None: the same for every micro-batch), `rows_per_item` how many
    entries of that dimension belong to one item of the batch.
    """

    resolver: Resolver
    call: PipelinedCall
    value: str
    batch_dim: int | None
    rows_per_item: int


@dataclass(frozen=True, eq=False)
class Operation:
    """A recorded torch function. `args` and `kwargs` contain `Record`s for deferred tensors, and real tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_enabled: bool
    autocast: tuple[str, torch.dtype, bool]
    where: str
    calls: tuple[PipelinedCall, ...]
    """The calls of models that the result depends on."""
    versions: tuple[tuple[torch.Tensor, type, int], ...]
    """Real tensors among the arguments, their types, and how often they had been changed in place."""
    draw: known.Draw | None = None
    number: int = field(default_factory=itertools.count().__next__)
    """Later operations have higher numbers."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Run on other arguments, in the recorded gradient and autocast modes; returns the flattened results."""
        mode = torch.autocast(*self.autocast)
        with torch.set_grad_enabled(self.grad_enabled and torch.is_grad_enabled()), mode:
            if self.draw is not None:
                return pytree.tree_leaves(self.draw.repeat(self.func, args, kwargs))
            return pytree.tree_leaves(self.func(*args, **kwargs))

    def without_data(self) -> Operation:
        """The same operation, referring to no tensor and no call."""
        return replace(self, args=(), kwargs={}, calls=(), versions=())

    def check_unchanged(self) -> None:
        """Raise if an argument was changed after this operation was recorded and before it could run."""
        for tensor, kind, version in self.versions:
            if type(tensor) is not kind or tensor._version != version:  # type: ignore[attr-defined]
                raise PfeifeError(
                    id="PF521",
                    what=f"a tensor that `{known.name_of(self.func)}` uses was changed before the result was known",
                    where=self.where,
                    why="operations on a pipelined model's outputs run when the model does, at backward or when read",
                    hints=("change the tensor after backward", "pass a copy: tensor.clone()", "read the result first"),
                )


@dataclass(eq=False)
class Record:
    """What a deferred tensor stands for: a leaf, or output `index` of an operation; and its value once known."""

    fake: torch.Tensor
    leaf: Leaf | None = None
    operation: Operation | None = None
    index: int = 0
    value: torch.Tensor | None = None
    promise: Callable[[], torch.Tensor] | None = field(default=None)
    """Gives the value without computing: set when the schedule that computes it has been run."""

    @functools.cached_property
    def metadata(self) -> Metadata | None:
        """The value's metadata, if it has no more than the usual."""
        return Metadata.of(self.fake)

    @property
    def calls(self) -> tuple[PipelinedCall, ...]:
        """The calls of models that the value depends on."""
        if self.leaf is not None:
            return (self.leaf.call,)
        return self.operation.calls if self.operation is not None else ()

    @property
    def live(self) -> bool:
        """Whether the script may still differentiate through a call that the value depends on."""
        return any(call.differentiable for call in self.calls)

    def known(self) -> torch.Tensor | None:
        """The value if it costs no schedule to get."""
        if self.value is None and self.promise is not None:
            self.value, self.promise = self.promise(), None
        return self.value


# ---------------------------------------------------------------------------------------------------- values


_KEPT_NUMEL = 4096


def value_of(root: Record) -> torch.Tensor:
    """Compute a record's value; of what it is made of, only small values are kept."""
    made: dict[int, list[Any]] = {}

    def value(item: Any) -> Any:
        if not isinstance(item, Record):
            return item
        found = item.known()
        if found is None and item.leaf is not None:
            found = item.value = item.leaf.resolver.resolve_leaf(item.leaf)
        return made[id(item.operation)][item.index] if found is None else found

    with torch.inference_mode(False), torch.no_grad():
        for leaf in [r.leaf for r in _unknown_before(root) if r.leaf is not None]:
            leaf.resolver.bring(leaf)  # the schedule may make the root itself known, or much that it is made of
        for record in [r for r in _unknown_before(root) if r.operation is not None]:
            operation = record.operation
            assert operation is not None
            if root.known() is not None:  # resolving an argument may have run the step that delivers this very value
                break
            if record.known() is not None or id(operation) in made:
                continue
            operation.check_unchanged()
            args, kwargs = mapped((operation.args, operation.kwargs), value)
            if record.known() is not None:
                continue
            made[id(operation)] = operation.run(args, kwargs)
            if record is root or record.fake.numel() <= _KEPT_NUMEL:
                record.value = made[id(operation)][record.index]
        return value(root)  # type: ignore[no-any-return]


def _unknown_before(root: Record) -> list[Record]:
    """Records to compute for a record, each after those it reads (no recursion: a script may chain thousands)."""
    order: list[Record] = []
    stack, expanded = [root], set()
    while stack:
        record = stack.pop()
        if record.known() is not None:
            continue
        if id(record) in expanded:
            order.append(record)
            continue
        expanded.add(id(record))
        stack.append(record)
        if record.operation is None:
            continue
        stack += [r for r in records_in((record.operation.args, record.operation.kwargs)) if id(r) not in expanded]
    return order


def records_in(structure: Any) -> list[Record]:
    """All records in the arguments of an operation."""
    found: list[Record] = []
    mapped(structure, lambda item: found.append(item) if isinstance(item, Record) else None)
    return found
