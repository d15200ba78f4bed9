"""Calls that change a tensor in place, where the tensor or what it is given is deferred.

A deferred tensor that is changed stands for the result from then on; so do, each for its part, the deferred tensors
that share its memory. A real tensor is changed for real, or becomes a deferred tensor where a gradient must flow into
it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.recording import Deferred, deferred_in, needs_gradient, record_call, refused, resolved
from pfeife_accelerate.capture.records import Record
from pfeife_accelerate.capture.torch_functions import mapped
from pfeife_accelerate.compat import disable_torch_function, pytree


def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x += y`, `x[i] = y`, `x.add_(y)`: the deferred tensor and all that share its memory stand for the result."""
    target = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(target, Deferred):
        return _change_real(func, target, args, kwargs)
    if not args:
        raise refused(func, "the tensor that it changes was passed by name", ("pass it first",))
    before = type(target).make(target.record)
    if known.name_of(func) == "detach_":
        _stand_for(target, _record_of(record_call(torch.Tensor.detach, (before,), {}), before))
        return target
    is_real = lambda x: isinstance(x, torch.Tensor) and not isinstance(x, Deferred)  # noqa: E731
    args = known.masks_as_indices(func, (before, *args[1:]), is_real)
    keep_gradient = not torch.is_grad_enabled() and before.record.fake.requires_grad
    with torch.set_grad_enabled(torch.is_grad_enabled() or keep_gradient):
        function, args, kwargs = known.out_of_place(func, args, kwargs, keep_gradient)
        _write(target, _record_of(record_call(function, args, kwargs), before), keep_gradient)
    return None if known.name_of(func) == "__setitem__" else target


def _stand_for(target: Deferred, record: Record) -> None:
    target.record = record
    with disable_torch_function():
        if target.requires_grad != record.fake.requires_grad and target.grad_fn is None:
            target.requires_grad_(record.fake.requires_grad)


def _record_of(result: Any, like: Deferred) -> Record:
    if isinstance(result, Deferred):
        return result.record
    return Record(fake=like.record.fake, value=result)


def _write(target: Deferred, record: Record, keep_gradient: bool, changed_view: Deferred | None = None) -> None:
    """Let a tensor stand for another value; the tensors that share its memory follow."""
    _stand_for(target, record)
    for view in [v for v in (reference() for reference in target.views) if v is not None and v is not changed_view]:
        _, old, operation, index = view.viewed  # type: ignore[misc]  # a view has one
        now = type(target).make(record)
        args, kwargs = mapped(
            (operation.args, operation.kwargs), partial(_argument, viewed=old, instead=now, cls=type(target))
        )
        with torch.set_grad_enabled(operation.grad_enabled):
            again = pytree.tree_leaves(record_call(operation.func, args, kwargs))[index]
        _write(view, _record_of(again, view), keep_gradient, changed_view=target)
    if target.viewed is not None and changed_view is not target.viewed[0]:
        source, old, operation, index = target.viewed
        written = known.WrittenBack(operation.func, index, keep_gradient)
        args, kwargs = mapped(
            (operation.args, operation.kwargs), partial(_argument, viewed=old, instead=known.SOURCE, cls=type(target))
        )
        before, changed = type(target).make(source.record), type(target).make(record)
        with torch.set_grad_enabled(torch.is_grad_enabled() or keep_gradient):
            result = _record_of(record_call(written, (before, changed, args, kwargs), {}), source)
        _write(source, result, keep_gradient, changed_view=target)


def _argument(item: Any, viewed: Record, instead: Any, cls: type[Deferred]) -> Any:
    """An argument of the operation that made a view, for the same operation on something else."""
    if item is viewed:
        return instead
    return cls.make(item) if isinstance(item, Record) else item


def _change_real(func: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A real tensor is changed for real, unless that would lose a gradient: then it becomes a deferred tensor."""
    if deferred_in(target):
        raise refused(func, "it changes several tensors at once", ("change them one by one",))
    if not (torch.is_grad_enabled() and any(needs_gradient(t) for t in deferred_in((args, kwargs)))):
        return func(*resolved(args), **resolved(kwargs))
    if target.requires_grad and target.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if target._is_view() or not args:
        hints = ("collect the values in a list and use torch.stack or torch.cat", "use an out-of-place form")
        raise refused(func, "a gradient would have to flow through a part of a tensor that exists already", hints)
    before = torch.empty(0)
    try:
        torch.utils.swap_tensors(target, before)
    except RuntimeError as error:  # a weak reference or a saved tensor holds on to it
        raise refused(
            func, f"the tensor cannot become a deferred one: {error}", ("use an out-of-place form",)
        ) from error
    try:
        function, new_args, new_kwargs = known.out_of_place(func, (before, *args[1:]), kwargs, keep_gradient=False)
        result = record_call(function, new_args, new_kwargs)
    except BaseException:
        torch.utils.swap_tensors(target, before)
        raise
    torch.utils.swap_tensors(target, result)
    return None if known.name_of(func) == "__setitem__" else target


def write_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with `out=`: for real, where no gradient is lost."""
    if deferred_in(kwargs["out"]):
        raise refused(func, "the output of a pipelined model has no memory to write into", ("drop out=",))
    if torch.is_grad_enabled() and any(needs_gradient(t) for t in deferred_in((args, kwargs))):
        name = known.name_of(func)
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    return func(*resolved(args), **resolved(kwargs))
