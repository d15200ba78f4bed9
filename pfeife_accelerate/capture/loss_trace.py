"""The ATen graph of a recorded loss, traced on fake whole-batch tensors.

Autograd is not part of the trace. What it would have seen is kept in the nodes' metadata: `detached` marks results
that no gradient flows through, `where` is the script's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.capture.loss_states import Refused
from pfeife_accelerate.compat import FakeTensorMode, OpOverload, TorchDispatchMode, schema_of


def trace(expression: Expression, fake_mode: FakeTensorMode, numbers: Sequence[float]) -> fx.GraphModule:
    """ATen graph of the expression on fake whole-batch tensors: inputs are leaves then constants, outputs the scalars.

    `numbers` take the place of the expression's own.

    Raises: Refused if the expression cannot be traced: a shape depends on data, or a value that others see is changed.
    """
    num_leaves = len(expression.leaves)
    fakes = [record.fake.detach() for record in expression.leaves]
    fakes += [fake_mode.from_tensor(c.detach(), static_shapes=True) for c in expression.constants]
    annotate = _Annotate()

    def replay(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with annotate:
            return expression.replay(
                tensors[:num_leaves], tensors[num_leaves:], before_step=annotate.begin, numbers=numbers
            )

    try:
        with torch.enable_grad():
            gm = make_fx(replay, tracing_mode="fake")(*fakes)
    except Exception as error:  # the exact order needs no trace, so whatever stops the trace is a reason to take it
        reason = f"{annotate.step} ({type(error).__name__} when traced)"
        raise Refused(reason, annotate.where) from error
    _without_mutation(gm.graph)
    gm.graph.eliminate_dead_code()
    return gm


def trace_with_free_numbers(expression: Expression, fake_mode: FakeTensorMode) -> fx.GraphModule | None:
    """The same graph with the numbers as its last inputs; None if one of them does not go into an operation as it is.

    They are told by their values: numbers that no script writes, each in one place.
    """
    marks = [_MARK * (1 + i / 4096) for i in range(len(expression.numbers))]
    gm = trace(expression, fake_mode, marks)
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for i, mark in enumerate(marks):
        users = [n for n in gm.graph.nodes if any(type(arg) is float and arg == mark for arg in n.args)]
        if not users:
            return None
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"number_{i}")
        last.meta["val"] = expression.numbers[i]
        for user in users:
            user.args = tuple(last if type(arg) is float and arg == mark else arg for arg in user.args)
    return gm


_MARK = 0.7310585786300049e-3


class _Annotate(TorchDispatchMode):
    """Writes into each traced node where it comes from and whether a gradient flows through its result."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""
        self.step = "an operation"

    def begin(self, step: str, where: str) -> None:
        """The operations that follow belong to this step of the expression."""
        self.step, self.where = step, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then annotate the node it has become."""
        proxy_mode = get_proxy_mode()
        nodes = proxy_mode.tracer.graph.nodes if proxy_mode is not None else ()
        before = len(nodes)
        result = func(*args, **(kwargs or {}))
        for _, node in zip(range(len(nodes) - before), reversed(nodes), strict=False):
            node.meta["where"] = self.where
            node.meta["detached"] = not torch.is_grad_enabled() or func is torch.ops.aten.detach.default
        return result


def _without_mutation(graph: fx.Graph) -> None:
    """Replace in-place operations on fresh values (ATen's own losses use some) by their out-of-place forms.

    Raises: Refused if the changed value may have another name: an input, a view, or a value with views.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
            continue
        name, overload = str(node.target).removeprefix("aten.").split(".")
        target, functional = node.args[0], getattr(torch.ops.aten, name.removesuffix("_"), None)
        where = node.meta.get("where", "")
        if not name.endswith("_") or functional is None or overload not in functional.overloads():
            raise Refused(name, where)
        if target.op != "call_function" or _has_other_name(target, before=node, order=order):
            raise Refused(name, where)
        if tuple(target.meta["val"].shape) != tuple(node.meta["val"].shape):
            raise Refused(name, where)
        node.target = getattr(functional, overload)
        node.meta["keeps_gradient_of"] = target if node.meta.get("detached") else None
        target.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: order[user] > order[node])


def _has_other_name(value: fx.Node, *, before: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a value shares its memory with another one that exists before a node."""
    return _is_view(value) or any(_is_view(user) and order[user] < order[before] for user in value.users)


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"  # one of several results
    schema = schema_of(node.target)
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
