"""Owned values: made of the rows of one group, so one micro-batch has all of it. Any operation may be done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, arguments, name, refusal, shape
from pfeife_accelerate.capture.loss_operands import Places, taken
from pfeife_accelerate.capture.loss_states import Owned, Split, State, StateKind, Window


def owner_of(b: LossBuilder, node: fx.Node) -> int | None:
    """The one group that all of a node's operands are made of, if there is one; what every micro-batch has aside.

    Results of operations that cut along the batch have no state of their own and no common owner.
    """
    states = [b.states.get(n) for n in node.all_input_nodes if not b.is_constant(n)]
    owners = {None if s is None else s.owner for s in states if s is None or s.kind is not StateKind.REPLICATED}
    return owners.pop() if len(owners) == 1 else None


def owned_operation(b: LossBuilder, node: fx.Node, group: int) -> Result:
    """The operation as it is, where the operands are."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), b.operand)
    return run_if_owned(b, group, node.target, args, kwargs), Owned(group)


def run_if_owned(b: LossBuilder, group: int, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
    """An operation in the micro graph that does nothing in micro-batches without this group."""
    return b.emit(_Where.owned(target), b.owned(group), tuple(args), kwargs)


class _Where:
    """Functions that run another one in the micro-batch that owns its operands; one for each, with a name for fx."""

    _made: dict[Any, Callable[..., Any]] = {}  # noqa: RUF012

    @classmethod
    def owned(cls, target: Callable[..., Any]) -> Callable[..., Any]:
        """`target`, or None where the operands are not."""
        if target not in cls._made:

            def run(owned: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return target(*args, **kwargs) if owned else None

            run.__name__ = "owned_" + str(getattr(target, "__name__", "function")).replace(".", "_")
            cls._made[target] = run
        return cls._made[target]


def select_item(b: LossBuilder, node: fx.Node, source: fx.Node, state: State, entry: int) -> Result:
    """`x[i]` along the batch, out of a window that is known."""
    if state.window.picks is not None:
        raise refusal(node)
    group = state.window.groups[entry // state.rows]
    place = b.places(state.window, (entry // state.rows,), state.rows)
    return b.emit(_entry, b.micro[source], state.dim, place, entry % state.rows), Owned(group)


def _entry(value: torch.Tensor, dim: int, item: Places, entry: int) -> torch.Tensor | None:
    """One entry of the item at these places; None if the micro-batch has no such item."""
    found = taken(value, dim, item)
    return found.select(dim, entry) if found.shape[dim] else None


def joined(b: LossBuilder, node: fx.Node) -> Result:
    """`stack` and `cat` of values that belong to different groups: one value that carries the batch again."""
    given = arguments(node)
    parts: list[fx.Node] = list(given["tensors"])
    dim = given["dim"] % len(shape(node))
    groups: list[int] = []
    for part in parts:
        if b.is_constant(part) or b.state(part).kind is not StateKind.OWNED:
            raise refusal(node)
        groups += [b.state(part).group] * (1 if name(node).startswith("stack") else shape(part)[dim])
    value = node.meta["val"]
    sizes = [0 if d == dim else size for d, size in enumerate(value.shape)]
    micro = [b.micro[p] for p in parts]
    present = [b.owned(b.state(p).group) for p in parts]
    out = b.emit(_join_present, name(node).startswith("stack"), micro, present, dim, sizes, value.dtype, value.device)
    return out, Split(dim, 1, Window(tuple(groups)))


def _join_present(
    stacked: bool,
    parts: list[torch.Tensor | None],
    present: list[bool],
    dim: int,
    sizes: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    found = [part for part, here in zip(parts, present, strict=True) if here and part is not None]
    if not found:
        return torch.empty(sizes, dtype=dtype, device=device)
    return (torch.stack(found, dim) if stacked else torch.cat(found, dim)).to(dtype)
