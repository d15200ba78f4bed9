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
from pfeife_accelerate.capture.recording import (
    Deferred,
    Memory,
    deferred_in,
    needs_gradient,
    record_call,
    refused,
    resolved,
)
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
        if target.memory is not None and len(target.memory.living()) > 1:
            raise refused(func, "other tensors share its memory", ("x = x.detach()",))
        _stand_for(target, _record_of(record_call(torch.Tensor.detach, (before,), {}), before))
        return target
    is_real = lambda x: isinstance(x, torch.Tensor) and not isinstance(x, Deferred)  # noqa: E731
    args = known.masks_as_indices(func, (before, *args[1:]), is_real)
    keep_gradient = not torch.is_grad_enabled() and before.record.fake.requires_grad
    with torch.set_grad_enabled(torch.is_grad_enabled() or keep_gradient):
        function, args, kwargs = known.out_of_place(func, args, kwargs, keep_gradient)
        made = _record_of(record_call(function, args, kwargs), before)
    _write(target, made)
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


def _write(target: Deferred, record: Record) -> None:
    """Let a tensor stand for another value; the tensors that share its memory follow."""
    cls, memory = type(target), target.memory
    _stand_for(target, record)
    if memory is None:
        return
    others = [member for member in memory.living() if member is not target]
    if not others:
        target.memory, target.steps = None, ()
        return
    if record.fake.requires_grad and any(step.cuts_gradient for step in target.steps):
        why = "a gradient would flow into the memory of another tensor through detach()"
        raise refused(torch.Tensor.detach, why, ("change a copy: x.detach().clone()",))
    memory.record = _written_back(target, memory, record) if target.steps else record
    for view in others:
        now: Any = cls.make(memory.record)
        for step in view.steps:
            args, kwargs = mapped((step.args, step.kwargs), partial(_argument, cls=cls, source=now))
            call = record_call if deferred_in((args, kwargs)) else _call
            with torch.set_grad_enabled(step.grad_enabled):
                now = pytree.tree_leaves(call(step.func, args, kwargs))[step.index]
        _stand_for(view, _record_of(now, view))


def _written_back(view: Deferred, memory: Memory, changed: Record) -> Record:
    """The memory's value after a view was changed."""
    cls, keep_gradient = type(view), not torch.is_grad_enabled() and memory.record.fake.requires_grad
    function = known.WrittenBack(tuple((s.func, s.index, s.grad_enabled) for s in view.steps), keep_gradient)
    arguments = [mapped((s.args, s.kwargs), partial(_argument, cls=cls)) for s in view.steps]
    before = cls.make(memory.record)
    with torch.set_grad_enabled(torch.is_grad_enabled() or keep_gradient):
        return _record_of(record_call(function, (before, cls.make(changed), arguments), {}), before)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _argument(item: Any, cls: type[Deferred], source: Any = known.SOURCE) -> Any:
    """An argument of the operation that made a view, for the same operation on something else."""
    if item is known.SOURCE:
        return source
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
