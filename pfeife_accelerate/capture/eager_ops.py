"""Operations that Python runs on fake tensors between two captured graphs.

Dynamo leaves some code alone: helpers it is told to skip, functions with a graph break in a loop. Such code runs on the
fakes that earlier graphs returned. Models: operations as the code calls them, each noted with the tensors it read and
made, so that it can be put between the graphs. Ignores (refuses): changes in place, and code that switches gradients
on or off, which may be a custom autograd function at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.compat import FakeTensor, FakeTensorMode, dynamic_dims, mark_dynamic, not_a_frame, pytree

_SWITCHED = "{} runs in code that was not captured, with gradients switched on or off"


@dataclass(frozen=True, kw_only=True)
class EagerOp:
    """One operation with the very tensors it read and made; `kind` and `target` are those of an fx node."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    is_tuple: bool
    problem: str | None = None
    """Why it cannot be put into a graph, should its result be needed."""

    @property
    def leaves(self) -> list[Any]:
        """The arguments without the structure they are in."""
        return pytree.tree_leaves((self.args, dict(self.kwargs)))

    def add_to(self, graph: fx.Graph, leaves: Sequence[Any]) -> fx.Node:
        """The operation as a node, with these in place of its arguments."""
        _, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        return graph.create_node(self.kind, self.target, args, kwargs)


class ValuelessMode(FakeTensorMode):
    """The fake mode of a model's twins: reading a value of a fake raises, as there is none."""

    def __init__(self) -> None:
        shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        super().__init__(allow_non_fake_inputs=True, shape_env=shape_env)


class OperationRecorder(TorchFunctionMode):
    """Notes the operations that run in no captured graph. Dynamo traces through it, and leaves no trace of it.

    Where the code asks for a value, `read` gives the real tensor for a fake.
    """

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._read = read
        not_a_frame(OperationRecorder.__torch_function__)
        self.ops: list[EagerOp] = []
        self.refused: str | None = None
        self._grad = torch.is_grad_enabled()
        self._is_paused = False
        self._seen: set[int] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For operations that are not the model's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note it unless Dynamo does."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self._note(func, args, kwargs or {})

    @torch.compiler.disable
    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is_paused:
            return func(*args, **kwargs)
        if known.kind_of(func, args, dict(kwargs)) is known.Kind.READ:
            with self.paused():
                real_args, real_kwargs = known.mapped((args, dict(kwargs)), self._real)
                return func(*real_args, **real_kwargs)
        result = func(*args, **kwargs)
        outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        made = [value for value in outputs if isinstance(value, torch.Tensor)]
        kind, target = _node_of(func)
        read = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        if _changes_in_place(func, kwargs) and any(isinstance(t, FakeTensor) or id(t) in self._seen for t in read):
            self.refused = self.refused or f"{target} changes a tensor in place outside the captured graphs"
        # What is made of no tensor is a constant of this call.
        if not made or not read:
            return result
        self._seen.update(id(tensor) for tensor in (*read, *made))
        for tensor in made:
            mark_dynamic(tensor, _open_dims(tensor, read))
        if kind == "getattr":
            kind, target, args = "call_function", getattr, (args[0], target)
        self.ops.append(
            EagerOp(
                kind=kind,
                target=target,
                args=args,
                kwargs=dict(kwargs),
                outputs=outputs,
                is_tuple=not isinstance(result, torch.Tensor),
                problem=None if torch.is_grad_enabled() == self._grad else _SWITCHED.format(target),
            )
        )
        return result

    def _real(self, item: Any) -> Any:
        return self._read(item) if isinstance(item, FakeTensor) else item


def _open_dims(made: torch.Tensor, read: Sequence[torch.Tensor]) -> list[int]:
    """Dimensions of a result whose size an operation takes over from an open dimension of what it read.

    In the same place if possible, else wherever the size is the same, or a multiple of it (of flattened dimensions).
    """
    opened = [(dim, tensor.shape[dim]) for tensor in read for dim in dynamic_dims(tensor)]
    sizes = {size for _, size in opened if size > 1}
    found = [dim for dim, size in enumerate(made.shape) if (dim, size) in opened]
    found = found or [dim for dim, size in enumerate(made.shape) if size in sizes]
    return found or [dim for dim, size in enumerate(made.shape) if any(size % of == 0 for of in sizes)][:1]


def _node_of(func: Any) -> tuple[str, Any]:
    """The kind and target of the fx node for what a mode is given."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return "getattr", func.__self__.__name__
    if vars(torch.Tensor).get(name) is func or vars(torch.Tensor.__base__).get(name) is func:
        return "call_method", name
    return "call_function", func


def _changes_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", str(func))
    if name == "__set__" or name == "__setitem__" or kwargs.get("inplace") is True or kwargs.get("out") is not None:
        return True
    if name.startswith("__"):
        return name[2:].startswith("i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_")
