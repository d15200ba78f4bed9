"""The loss on the rank that computes it: a micro-batch at a time where that is exact, else on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.capture.loss import Rows, SplitLoss
from pfeife_accelerate.runtime.microbatch import Microbatch
from pfeife_accelerate.session.trial import Trial


class MicrobatchLoss:
    """A split loss at work: the `LossStage` of a planned step, and the whole batch's values once it is over."""

    def __init__(
        self,
        expression: Expression,
        constants: Sequence[torch.Tensor],
        loss: SplitLoss | None,
        gradient: torch.Tensor | None,
        *,
        on_trial: bool = False,
    ) -> None:
        self._expression = expression
        self._constants = constants
        self._loss = loss
        self._gradient = gradient
        self._names = [leaf.value for leaf in expression.leaf_info]
        self._whole = loss.prepare(constants, expression.numbers) if loss is not None else None
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._trial = Trial(expression) if on_trial else None

    @property
    def on_trial(self) -> bool:
        """Whether the result is to be held against the whole batch's."""
        return self._trial is not None

    def forward(self, microbatch: Microbatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The micro-batch's share of the loss, times the gradient given to `backward`."""
        leaves = [values[name] for name in self._names]
        parts = self._scalars(microbatch, leaves)
        self._parts.append(tuple(part.detach() for part in parts))
        if self._trial is not None:
            self._trial.add(microbatch, leaves, lambda copies: self._root(self._scalars(microbatch, copies)[0]))
        return self._root(parts[0])

    def _scalars(self, microbatch: Microbatch, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self._loss is None or self._whole is None:  # one micro-batch: the whole batch, as the script wrote it
            return tuple(self._expression.replay(leaves, self._constants))
        rows = Rows(start=microbatch.first_group, count=microbatch.num_groups)
        return self._loss.run(leaves, self._whole, rows)

    def _root(self, loss: torch.Tensor) -> torch.Tensor:
        return _times(loss, self._gradient)

    def is_right(self) -> bool:
        """Once the step is over: whether the micro-batches' shares make up the whole batch's loss and gradients."""
        if self._trial is None:
            return True
        constants = [constant.detach() for constant in self._constants]
        scalars, gradients = whole_batch_loss(self._expression, constants, self._trial.values(), self._gradient)
        return self._trial.agrees(self.totals()[0], scalars[0], gradients)

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
    _times(scalars[0], gradient).backward()
    return [scalar.detach() for scalar in scalars], [leaf.grad for leaf in inputs]


def _times(loss: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    weighted = loss if gradient is None else loss * gradient.to(loss.device)
    return weighted if weighted.dim() == 0 else weighted.sum()
