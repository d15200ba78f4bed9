"""Losses split over micro-batches by hand, held against the same losses on real tensors over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pfeife_accelerate.capture.deferred import FAKE_MODE, DeferredTensor, Leaf
from pfeife_accelerate.capture.expression import extract
from pfeife_accelerate.capture.loss import Rows, SplitLoss, split
from pfeife_accelerate.capture.loss_states import Refused
from pfeife_accelerate.ir.row_groups import RowGroups
from pfeife_accelerate.runtime.microbatch import Microbatch, take, whole

Loss = Callable[..., torch.Tensor]
F64 = torch.float64
TRAINABLE = (
    torch.linspace(0.1, 1.0, 11, dtype=F64).requires_grad_(),
    torch.tensor(1.3, dtype=F64).requires_grad_(),
)
"""Tensors outside the model that get a gradient."""


class Call:
    differentiable = True

    def note(self, record: object) -> None:
        """Nothing to do with it."""


class Whole:
    """A resolver that has the whole batch's value at hand."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def bring(self, leaf: Leaf) -> None:
        """It is there."""

    def resolve_leaf(self, leaf: Leaf) -> torch.Tensor:
        return self.value


def deferred(value: torch.Tensor, batch_dim: int | None = 0, rows: int = 1, call: Call | None = None) -> DeferredTensor:
    leaf = Leaf(Whole(value.detach()), call or Call(), f"value{id(value)}", batch_dim, rows)  # type: ignore[arg-type]
    return DeferredTensor.leaf(leaf, tuple(value.shape), value.dtype, value.device, value.is_floating_point())


def split_loss(loss: Loss, outputs: Sequence[torch.Tensor], dims: Sequence[int | None], batch: int) -> tuple:
    call = Call()
    result = loss(
        *(
            deferred(x, dim, x.shape[dim] // batch if dim is not None else 1, call)
            for x, dim in zip(outputs, dims, strict=True)
        )
    )
    if not isinstance(result, DeferredTensor):
        raise Refused("real", "")
    expression = extract(result)
    order = [next(i for i, x in enumerate(outputs) if leaf.value == f"value{id(x)}") for leaf in expression.leaf_info]
    return expression, split(expression, FAKE_MODE, batch), order


def microbatches(groups: RowGroups, batch: int, sizes: Sequence[int]) -> list[Microbatch]:
    """Micro-batches of these sizes, in groups; cut short if there are fewer groups than that."""
    found, first, total = [], 0, groups.number(batch)
    for size in sizes:
        count = min(size, total - first)
        if count > 0:
            rows = Microbatch(index=len(found), first_group=first, num_groups=count, total=batch, groups=groups)
            found.append(rows)
        first += max(count, 0)
    assert first == total
    return found


def by_microbatches(
    expression, planned: SplitLoss, order: Sequence[int], outputs, dims, sizes: Sequence[int], numbers=None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Whole-batch scalars, and gradients of the outputs, from micro-batches of these sizes."""
    batch, parts = sum(sizes), []
    gradients: list[list[torch.Tensor]] = [[] for _ in outputs]
    constants = [c.detach().requires_grad_(c.requires_grad) for c in expression.constants]
    values = planned.prepare(constants, expression.numbers if numbers is None else numbers)
    batches = microbatches(planned.groups, batch, sizes)
    for rows in batches:
        leaves = []
        for i in order:
            x, dim = outputs[i].detach(), dims[i]
            part = x if dim is None else take(x, dim, rows, x.shape[dim] // batch)
            leaves.append(part.clone().requires_grad_(x.is_floating_point()))
        part = planned.run(leaves, values, Rows(start=rows.first_group, count=rows.num_groups))
        if part[0].requires_grad:
            part[0].backward()
        for i, leaf in zip(order, leaves, strict=True):
            gradients[i].append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        parts.append(tuple(p.detach() for p in part))
    totals = [planned.total(i, [p[i] for p in parts]) for i in range(len(parts[0]))]
    found = [
        torch.zeros_like(x) if not g else sum(g) if dim is None else whole(g, dim, batches)
        for x, dim, g in zip(outputs, dims, gradients, strict=True)
    ]
    return totals, found + [c.grad for c in constants if c.requires_grad]


def assert_exact(loss: Loss, outputs, dims, sizes_list, tolerance: float = 1e-12) -> SplitLoss:
    batch = sum(sizes_list[0])
    expression, planned, order = split_loss(loss, outputs, dims, batch)
    real = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in outputs]
    trainable = [c for c in expression.constants if c.requires_grad]
    for tensor in TRAINABLE:
        tensor.grad = None
    expected = loss(*real)
    if expected.requires_grad:
        expected.backward()
    outside = [tensor.grad for tensor in TRAINABLE]
    scalars = expression.replay([real[i].detach() for i in order], expression.constants)
    for sizes in sizes_list:
        totals, gradients = by_microbatches(expression, planned, order, outputs, dims, sizes)
        for total, scalar in zip(totals, [expected.detach(), *scalars[1:]], strict=True):
            assert total.dtype == scalar.dtype
            torch.testing.assert_close(
                total.reshape(scalar.shape), scalar, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        for tensor in TRAINABLE:
            tensor.grad = None
        found_outside = gradients[len(real) :]
        if trainable:
            pairs = [(c, g) for c, g in zip(trainable, found_outside, strict=True) if g is not None]
            torch.autograd.backward([c for c, _ in pairs], [g for _, g in pairs], retain_graph=True)
        found_gradients = [*gradients[: len(real)], *(tensor.grad for tensor in TRAINABLE)]
        for found, wanted in zip(found_gradients, [*(x.grad for x in real), *outside], strict=True):
            if found is None and wanted is None:
                continue
            wanted = torch.zeros_like(found) if wanted is None else wanted
            found = torch.zeros_like(wanted) if found is None else found
            scale = float(wanted.abs().nan_to_num().max()) if wanted.numel() else 0.0
            torch.testing.assert_close(
                found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True
            )
    return planned
