"""Operations that Python runs on fake tensors between two captured graphs.

Dynamo leaves some code alone: helpers it is told to skip, frames it cannot read. Such code runs on the fakes that
earlier graphs returned. Models: operations that only make new tensors, each noted with its arguments, so that it can be
put between the graphs. Ignores (refuses): changes in place, random numbers, and values cut from their history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pfeife_accelerate.compat import FakeTensorMode, OpOverload, mark_dynamic, pytree, schema_of

_NOT_RECORDED = frozenset({torch.ops.aten.detach.default})


@dataclass(frozen=True, kw_only=True)
class EagerOp:
    """One operation with the very tensors it read and made."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]


class RecordingFakeMode(FakeTensorMode):
    """The fake mode of a model's twins; while it records, operations on them are noted.

    Reading a value of a fake raises, as there is none.
    """

    def __init__(self) -> None:
        shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        super().__init__(allow_non_fake_inputs=True, shape_env=shape_env)
        self._records = False
        self.rows = 0
        self.ops: list[EagerOp] = []
        self.refused: str | None = None

    @contextmanager
    def recording(self, rows: int) -> Iterator[None]:
        """Note operations on fakes; sizes that are multiples of `rows` are left open in what they make."""
        self.ops, self.refused, self.rows, self._records = [], None, rows, True
        try:
            yield
        finally:
            self._records = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """For operations of our own."""
        before, self._records = self._records, False
        try:
            with self:
                yield
        finally:
            self._records = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on fakes, and note it."""
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if self._records and isinstance(func, OpOverload):
            self._note(func, tuple(args), dict(kwargs or {}), result)
        return result

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
        if schema_of(func).is_mutable:
            self.refused = self.refused or f"{func} changes a tensor in place outside the captured graphs"
        if not tensors or func in _NOT_RECORDED or torch.Tag.nondeterministic_seeded in func.tags:
            return
        for tensor in tensors:
            mark_dynamic(tensor, [d for d, size in enumerate(tensor.shape) if open_size(size, self.rows)])
        self.ops.append(EagerOp(operator=func, args=args, kwargs=kwargs, outputs=outputs))


def open_size(size: int, rows: int) -> bool:
    """Whether a number may be a size that depends on the batch."""
    return rows > 1 and size > 0 and size % rows == 0


def tensors_of(op: EagerOp) -> list[torch.Tensor]:
    """The tensors that an operation reads."""
    return [leaf for leaf in pytree.tree_leaves((op.args, op.kwargs)) if isinstance(leaf, torch.Tensor)]
