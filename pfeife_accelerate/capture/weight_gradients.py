"""Operations whose weight's gradient can be computed later than that of their input: products with a parameter.

Models: one forward, whose backward gives the gradients of values at once and puts the rest, what the product read and
its output's gradient, into a list for later; everything as autograd would do it, under autocast too. A product whose
value needs no gradient is put off whole.
Ignores: products with what was computed from a parameter, products in regions that are computed again or under
`torch.vmap` and its kin, and parameters with hooks on their gradients: these get theirs with those of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.graph import get_gradient_edge

from pfeife_accelerate.capture.fused_accumulation import add_product, is_plain_leaf
from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind
from pfeife_accelerate.capture.nodes import inputs_of, mutates, target_name
from pfeife_accelerate.capture.regions import region_of
from pfeife_accelerate.compat import pytree

__all__ = ["Later", "adds_in_product", "putting_off", "weights_of"]

#: What is to be computed later, in any order.
Later: TypeAlias = list[Callable[[], None]]

_MODULES: Final = ("torch", "_operator")
_WEIGHT: Final = ((1, "weight"),)
#: For each operation, where its factors are: the position and the name of the argument.
_FACTORS: Final[Mapping[str, tuple[tuple[int, str], ...]]] = {
    "linear": _WEIGHT,
    **{f"conv{kind}{n}d": _WEIGHT for kind in ("", "_transpose") for n in (1, 2, 3)},
    "bilinear": ((2, "weight"),),
    "matmul": ((0, "input"), (1, "other")),
    "__matmul__": ((0, "input"), (1, "other")),
    "mm": ((0, "input"), (1, "mat2")),
    "mv": ((0, "input"), (1, "vec")),
    "bmm": ((0, "input"), (1, "mat2")),
    "addmm": ((1, "mat1"), (2, "mat2")),
    "addbmm": ((1, "batch1"), (2, "batch2")),
    "baddbmm": ((1, "batch1"), (2, "batch2")),
    "tensordot": ((0, "a"), (1, "b")),
}
_EINSUM: Final = "einsum"


def weights_of(graph: CapturedGraph, node: fx.Node) -> tuple[fx.Node, ...]:
    """The parameters that the operation's backward can leave for later; none if it is no product with a parameter."""
    example = node.meta.get("example_value")
    is_recorded = isinstance(example, torch.Tensor) and example.requires_grad and mutates(node) is None
    if not is_recorded or region_of(node) is not None or node in graph.transformed or not _is_of_torch(node):
        return ()
    if not any(_is_wanting(graph, factor) for factor in _factors(node)):
        return ()
    return tuple(read for read in inputs_of(node) if _is_wanting(graph, read))


def adds_in_product(graph: CapturedGraph, node: fx.Node) -> bool:
    """Whether the operation is a linear layer whose weight's gradient can be added within the product.

    Also in a region that is computed again, unless a context of the model's own is to see its operations.
    """
    region = region_of(node)
    is_seen = node in graph.transformed or (region is not None and region.context_fn is not None)
    return _is_linear(node) and not is_seen and _is_wanting(graph, node.args[1])


def _is_linear(node: fx.Node) -> bool:
    are_values = (isinstance(argument, fx.Node) for argument in node.args if argument is not None)  # the bias may be
    return node.target is F.linear and not node.kwargs and all(are_values)


def _is_of_torch(node: fx.Node) -> bool:
    return isinstance(node.target, str) or (getattr(node.target, "__module__", None) or "").startswith(_MODULES)


def _factors(node: fx.Node) -> Iterator[Any]:
    name = target_name(node)
    if name == _EINSUM:
        yield from pytree.tree_leaves((node.args[1:], node.kwargs))
    for position, keyword in _FACTORS.get(name, ()):
        yield node.args[position] if len(node.args) > position else node.kwargs.get(keyword)


def _is_wanting(graph: CapturedGraph, read: Any) -> bool:
    placeholder = graph.placeholder_of.get(read) if isinstance(read, fx.Node) else None
    is_state = placeholder is not None and placeholder.kind is PlaceholderKind.STATE
    return is_state and bool(read.meta["example_value"].requires_grad)


def putting_off(node: fx.Node, weights: tuple[fx.Node, ...]) -> tuple[Callable[..., torch.Tensor], list[fx.Node]]:
    """A function `(later, *values)` that does what the node does, and the nodes that it takes the values of.

    With a list for `later`, backward puts the computation of the weights' gradients there.
    """
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    reads = [leaves[place] for place in places]
    target: Any = partial(_method, node.target) if isinstance(node.target, str) else node.target

    def run(*values: Any) -> Any:
        given = list(leaves)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        args, kwargs = pytree.tree_unflatten(given, structure)
        return target(*args, **kwargs)

    positions = tuple(place for place, read in enumerate(reads) if read in weights)
    is_linear = _is_linear(node) and positions in ((1,), (1, 2)) and len(reads) == len(positions) + 1

    def call(later: Later | None, *values: Any) -> torch.Tensor:
        if later is None or not torch.is_grad_enabled() or not all(is_plain_leaf(values[p]) for p in positions):
            return run(*values)  # type: ignore[no-any-return]
        if is_linear and not values[1].is_complex() and values[1].dim() == 2:
            return _Linear.apply(later, *_cast(values), *values)  # type: ignore[no-any-return]
        return _Product.apply(later, run, positions, *values)  # type: ignore[no-any-return]

    call.__name__ = call.__qualname__ = f"{target_name(node).replace('.', '_')}_put_off"
    return call, reads


def _method(name: str, this: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(this, name)(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Any product: a graph of its own, which is gone through twice
# ---------------------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """The operation in a graph of its own. Each half of its backward is what autograd does for these inputs alone."""

    @staticmethod
    def forward(ctx: Any, later: Later, run: Callable[..., Any], weights: tuple[int, ...], *values: Any) -> Any:
        inner = list(values)
        ctx.wanted = {}
        for position, value in enumerate(values):
            if isinstance(value, torch.Tensor) and position not in weights:
                inner[position] = value.detach().requires_grad_(value.requires_grad)
                if value.requires_grad:
                    ctx.wanted[position] = inner[position]
        with torch.enable_grad():
            result = run(*inner)
        ctx.later, ctx.num_values, ctx.edge = later, len(values), get_gradient_edge(result)
        ctx.weights = list({id(values[p]): values[p] for p in weights}.values())
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        edge, wanted, ctx.edge, ctx.wanted = ctx.edge, ctx.wanted, None, None
        given: list[Any] = [None] * ctx.num_values
        if wanted:
            found = torch.autograd.grad(edge, list(wanted.values()), gradient, retain_graph=True)
            for position, value in zip(wanted, found, strict=True):
                given[position] = value
        ctx.later.append(partial(torch.autograd.backward, edge, gradient, inputs=ctx.weights))
        return (None, None, None, *given)


# ---------------------------------------------------------------------------------------------------------------------
# Linear: the same by hand, since a graph of its own costs the host as much as several operations
# ---------------------------------------------------------------------------------------------------------------------


def _cast(values: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Input, weight and bias as autocast hands them to the operation."""
    given = [value.detach() for value in (*values, None)[:3] if value is not None]
    device = given[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        is_cast = [t.is_floating_point() and t.dtype != torch.float64 and t.device.type == device for t in given]
        given = [t.to(dtype) if cast else t for t, cast in zip(given, is_cast, strict=True)]
    return given[0], given[1], given[2] if len(given) > 2 else None


class _Linear(torch.autograd.Function):
    """`linear` of values that autocast has seen to; the originals say who wants a gradient, and of which type."""

    @staticmethod
    def forward(
        ctx: Any,
        later: Later,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *originals: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.later, ctx.value_dtype, ctx.parameters = later, originals[0].dtype, originals[1:]
        return F.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        value, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        given = None
        if ctx.needs_input_grad[4]:
            given = rows.mm(weight).view(value.shape).to(ctx.value_dtype)
        ctx.later.append(partial(_add_gradients, rows, value, ctx.parameters))
        return (None, None, None, None, given, *(None for _ in ctx.parameters))


def _add_gradients(rows: torch.Tensor, value: torch.Tensor, parameters: tuple[torch.Tensor, ...]) -> None:
    weight, *bias = parameters
    with torch.no_grad():
        gradient = add_product(weight, rows.t(), value.reshape(-1, value.shape[-1]))
        if gradient is not None:
            _add(weight, gradient)
        if bias:
            _add(bias[0], rows.sum(0))


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd accumulates: in place; the first one is taken as it is if it lies in memory as the parameter does."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
