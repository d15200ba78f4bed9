"""The loss on the rank that computes it: a micro-batch at a time where that is exact, else on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.capture.loss import Rows, SplitLoss
from pfeife_accelerate.runtime.microbatch import Microbatch


class MicrobatchLoss:
    """A split loss at work: the `LossStage` of a planned step, and the whole batch's values once it is over."""

    def __init__(
        self,
        expression: Expression,
        constants: Sequence[torch.Tensor],
        loss: SplitLoss | None,
        gradient: torch.Tensor | None,
    ) -> None:
        self._expression = expression
        self._constants = constants
        self._loss = loss
        self._gradient = gradient
        self._names = [leaf.value for leaf in expression.leaf_info]
        self._whole = loss.prepare(constants, expression.numbers) if loss is not None else None
        self._parts: list[tuple[torch.Tensor, ...]] = []

    def forward(self, microbatch: Microbatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The micro-batch's share of the loss, times the gradient given to `backward`."""
        leaves = [values[name] for name in self._names]
        if self._loss is None or self._whole is None:  # one micro-batch: the whole batch, as the script wrote it
            parts = tuple(self._expression.replay(leaves, self._constants))
        else:
            rows = Rows(start=microbatch.first_group, count=microbatch.num_groups)
            parts = self._loss.run(leaves, self._whole, rows)
        self._parts.append(tuple(part.detach() for part in parts))
        root = parts[0]
        return root.sum() if self._gradient is None else (root * self._gradient.to(root.device)).sum()

    def totals(self) -> list[torch.Tensor]:
        """Whole-batch values of the expression's scalars."""
        if self._loss is None:
            return list(self._parts[-1])
        return [self._loss.total(i, [parts[i] for parts in self._parts]) for i in range(len(self._parts[0]))]


def whole_batch_loss(
    expression: Expression,
    constants: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    gradient: torch.Tensor | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The exact order's middle: the loss over the whole batch as the script wrote it.

    Returns: the expression's scalars, and the gradients of its leaves.
    """
    inputs = [
        leaf.detach().requires_grad_(record.fake.requires_grad)
        for leaf, record in zip(leaves, expression.leaves, strict=True)
    ]
    with torch.enable_grad():
        scalars = expression.replay(inputs, constants)
    root = scalars[0].sum() if gradient is None else (scalars[0] * gradient.to(scalars[0].device)).sum()
    root.backward()
    return [scalar.detach() for scalar in scalars], [leaf.grad for leaf in inputs]
