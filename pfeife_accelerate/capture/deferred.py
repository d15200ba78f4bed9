"""Deferred tensors: what a pipelined model returns in training, and the recording of what the script does with them.

A `DeferredTensor` has the class hierarchy, shape, dtype, device and `requires_grad` of the real tensor, but no data. It
is either a *leaf* (a value that some stage of the pipeline will compute) or the result of a recorded operation.
Operations are recorded at the level of torch functions. Asking for data (`item`, `print`, a branch) resolves the value
through the `Resolver` that made the leaf; an operation whose shape depends on data runs on real tensors and is recorded
as well.

What is recorded must be alike on all ranks, so it never depends on whether this rank's script has read a value, only on
which calls of models can still be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.custom_functions import CustomFunction, hides_its_backward
from pfeife_accelerate.capture.inplace import change, write_out
from pfeife_accelerate.capture.outcomes import FAKE_MODE
from pfeife_accelerate.capture.recording import (
    Deferred,
    deferred_in,
    needs_gradient,
    placeholder,
    record_call,
    refused,
    resolved,
)
from pfeife_accelerate.capture.records import (
    Leaf,
    Operation,
    PipelinedCall,
    Record,
    Resolver,
    records_in,
    value_of,
)
from pfeife_accelerate.capture.script import script_line
from pfeife_accelerate.compat import (
    BackwardCFunction,
    OpOverload,
    disable_torch_function,
    schema_of,
    transform_is_active,
)
from pfeife_accelerate.errors import PfeifeError

__all__ = [
    "FAKE_MODE", "DeferredTensor", "Leaf", "Operation", "PipelinedCall", "Record", "Resolver", "apply_custom_function",
    "is_deferred", "resolve", "resolve_tree",
]  # fmt: skip


class DeferredTensor(Deferred):
    """A tensor whose value the pipeline has not computed yet; see the module's docstring."""

    @staticmethod
    def leaf(
        leaf: Leaf, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, grad: bool
    ) -> DeferredTensor:
        """A deferred tensor for a value of the pipeline."""
        with FAKE_MODE, torch.no_grad():
            fake = torch.empty(shape, dtype=dtype, device=device)
        return DeferredTensor.make(Record(fake=fake.requires_grad_(grad), leaf=leaf))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record, answer from metadata, or resolve."""
        if torch.is_inference_mode_enabled():  # what is made in it could not be part of a loss later
            with torch.inference_mode(False), torch.no_grad():
                return _dispatch(func, tuple(args), dict(kwargs or {}))
        return _dispatch(func, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached by code below torch functions (collectives, scripted functions): records what is torch's own."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace != "aten":
            return func(*resolved(args), **resolved(kwargs))
        schema = schema_of(func)
        if not schema.is_mutable:
            return record_call(func, tuple(args), kwargs)
        written = [args[i] for i, a in enumerate(schema.arguments) if a.is_write and i < len(args)]
        differentiable = torch.is_grad_enabled() and any(needs_gradient(t) for t in deferred_in((args, kwargs)))
        if differentiable or deferred_in(written):
            raise refused(func, "it changes its argument below the level at which operations are recorded", ())
        return func(*resolved(args), **resolved(kwargs))


def is_deferred(value: Any) -> bool:
    """Whether a value is a deferred tensor."""
    return isinstance(value, DeferredTensor)


def resolve(tensor: DeferredTensor) -> torch.Tensor:
    """The real value of a deferred tensor; runs whatever part of the pipeline's schedule it needs."""
    return value_of(tensor.record)


def resolve_tree(structure: Any) -> Any:
    """The structure with every deferred tensor replaced by its value."""
    return resolved(structure)


def apply_custom_function(
    original: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`cls.apply(*args, **kwargs)`, recorded where a deferred tensor's gradient goes through it."""
    if not hides_its_backward(cls, args, kwargs, is_deferred):
        return original(cls, *args, **kwargs)
    for tensor in deferred_in((args, kwargs)):
        _refuse_foreign_gradient(tensor)
    return record_call(CustomFunction(cls, original), args, kwargs)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    kind, name = known.kind_of(func, args, kwargs), known.name_of(func)
    if kind is known.Kind.METADATA and args and isinstance(args[0], DeferredTensor):
        return id(args[0]) if name == "__hash__" else func(args[0].record.fake, *args[1:], **kwargs)
    if transform_is_active():
        raise _under_transform(func)
    if kind is known.Kind.READ:
        return func(*resolved(args), **resolved(kwargs))
    for tensor in deferred_in((args, kwargs)):
        _refuse_foreign_gradient(tensor)
    match kind:
        case known.Kind.BACKWARD:
            return _backward(*args, **kwargs)
        case known.Kind.REFUSED:
            raise refused(func, *known.why_refused(name))
        case known.Kind.REQUIRES_GRAD:
            return _requires_grad(*args, **kwargs)
        case known.Kind.GRAPH:
            return known.graph_attribute(name, requires_grad=args[0].record.fake.requires_grad)
        case known.Kind.ITERATE:
            return _iterate(args[0])
        case known.Kind.LIKE:
            return func(placeholder(args[0]), *resolved(args[1:]), **resolved(kwargs))
        case known.Kind.SHAPED_LIKE if not isinstance(args[0], DeferredTensor):
            return known.shaped_like(name, args[0], args[1].record.fake)
        case known.Kind.INPLACE:
            return change(func, args, kwargs)
        case known.Kind.OUT:
            return write_out(func, args, kwargs)
        case known.Kind.DROPOUT:
            return _dropout(*args, **kwargs)
        case known.Kind.MASKED if not kwargs and isinstance(args[0], Deferred) and not isinstance(args[1], Deferred):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0].expand(shape)[args[1].expand(shape)]
        case known.Kind.STATISTICS:
            return _with_statistics(func, *args, **kwargs)
        case _:
            return record_call(func, args, kwargs)


# ---------------------------------------------------------------------------------------------------- special calls


def _backward(
    loss: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    *,
    grad_tensors: Any = None,
) -> None:
    if isinstance(loss, list | tuple):  # torch.autograd.backward
        given = gradient if grad_tensors is None else grad_tensors
        gradients = given if isinstance(given, list | tuple) else [given] * len(loss)
        terms = [t if g is None else (t * g).sum() for t, g in zip(loss, gradients, strict=True)]
        return sum(terms[1:], start=terms[0]).backward(None, retain_graph, create_graph, inputs)  # type: ignore[no-any-return]
    if create_graph or inputs is not None:
        raise PfeifeError(
            id="PF502",
            what="backward(create_graph=True) and backward(inputs=...) are not supported on a pipelined model",
            where=script_line(),
            why="the stages' graphs live on other ranks and are freed micro-batch by micro-batch",
            hints=("drop the argument",),
        )
    if not loss.record.fake.requires_grad:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    if gradient is None and loss.record.fake.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if gradient is not None and loss.record.fake.numel() != 1:  # a sum over the batch, as far as gradients go
        return _backward(torch.mul(loss, gradient).sum(), None, retain_graph)  # type: ignore[func-returns-value]
    leaf = next(leaves_of(loss))  # every deferred tensor depends on one
    leaf.resolver.backward(loss, resolved(gradient), bool(retain_graph))


def leaves_of(tensor: Deferred) -> Iterator[Leaf]:
    """The pipeline's values that a deferred tensor depends on."""
    pending, seen = [tensor.record], set()
    while pending:
        record = pending.pop()
        if id(record) in seen:
            continue
        seen.add(id(record))
        if record.leaf is not None:
            yield record.leaf
        elif record.operation is not None:
            pending += records_in((record.operation.args, record.operation.kwargs))


def _refuse_foreign_gradient(tensor: Deferred) -> None:
    """A custom or scripted function hides its backward in `grad_fn`; only its forward has been recorded."""
    with disable_torch_function():
        if not tensor.requires_grad:
            return
        custom = isinstance(tensor.grad_fn, BackwardCFunction)
        foreign = custom or not tensor.record.fake.requires_grad
    if foreign and torch.is_grad_enabled() and tensor.record.live:
        kind = "a function with its own backward" if custom else "a scripted or transformed (vmap, torch.func) function"
        raise PfeifeError(
            id="PF522",
            what=f"{kind} ({_foreign_name(tensor)}) got a pipelined model's output",
            where=script_line(),
            why="its backward would be lost: operations are recorded, and differentiated where the last stage runs",
            hints=(
                "write it with torch operations and detach(): x + (y - x).detach() is a straight-through estimator",
                "apply it inside the model",
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) has none",
                "write a batched expression instead of torch.vmap",
            ),
        )


def _foreign_name(tensor: Deferred) -> str:
    """Name of the custom function that made a tensor."""
    with disable_torch_function():
        return type(tensor.grad_fn).__name__.removesuffix("Backward")


def _under_transform(func: Any) -> PfeifeError:
    return PfeifeError(
        id="PF540",
        what=f"`{known.name_of(func)}` under torch.vmap or torch.func got the output of a pipelined model",
        where=script_line(),
        why="a transform runs its function on tensors of its own; what it does with this one cannot be recorded",
        hints=("write the expression without the transform", "use it inside the model", "detach and read it first"),
    )


def _requires_grad(tensor: Deferred, requires_grad: bool = True) -> Deferred:
    now = bool(tensor.record.fake.requires_grad)
    if bool(requires_grad) == now:
        return tensor
    if now:
        raise RuntimeError("you can only change requires_grad flags of leaf variables.")
    raise refused(
        torch.Tensor.requires_grad_,
        "the gradient of an intermediate value could only be had from the rank that computes it",
        ("differentiate the loss with loss.backward()", "resolve the value first: torch.from_numpy(x.numpy())"),
    )


def _iterate(tensor: Deferred) -> Iterator[Any]:
    if tensor.record.fake.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(torch.unbind(tensor, 0))


def _dropout(input: Deferred, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The mask is drawn now, from the script's generator, so that all ranks draw alike; the product is recorded."""
    if not training or p == 0.0:
        return input
    mask = torch.nn.functional.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p)
    result = torch.mul(input, mask)
    return change(torch.Tensor.copy_, (input, result), {}) if inplace else result


def _with_statistics(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Batch norm outside the model: its running statistics are updated now, from the value; the rest is recorded."""
    flag = "training" if func is torch.nn.functional.batch_norm else "use_input_stats"
    training = rest[0] if rest else kwargs.get(flag, flag == "use_input_stats")
    if training and running_mean is not None:
        with torch.no_grad():
            func(*resolved((input, running_mean, running_var, weight, bias, *rest)), **resolved(kwargs))
        running_mean = running_var = None
    return record_call(func, (input, running_mean, running_var, weight, bias, *rest), kwargs)
