"""A split loss on trial: what it gave a micro-batch at a time is held against the whole batch's loss after the step.

Models: the loss and the gradients of the values that it reads, on the rank that computes it. Done when a loss is new.
Ignores: losses whose values would take more memory, whole, than can be spared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.runtime.microbatch import Microbatch, whole

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2
_COPIES = 8
_SPARE_BYTES = 1 << 30


class Trial:
    """Collects the micro-batches' values and gradients of one step."""

    def __init__(self, expression: Expression) -> None:
        self._expression = expression
        self._microbatches: list[Microbatch] = []
        self._values: list[list[torch.Tensor]] = []
        self._gradients: list[list[torch.Tensor | None]] = []

    def add(
        self,
        microbatch: Microbatch,
        leaves: Sequence[torch.Tensor],
        loss: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> None:
        """One micro-batch; `loss` gives its share for other leaves of the same values."""
        copies = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with torch.enable_grad():
            share = loss(copies)
        wanted = [copy for copy in copies if copy.requires_grad]
        found = iter(torch.autograd.grad(share, wanted, allow_unused=True))
        self._microbatches.append(microbatch)
        self._values.append([copy.detach() for copy in copies])
        self._gradients.append([next(found) if copy.requires_grad else None for copy in copies])

    def values(self) -> list[torch.Tensor]:
        """The whole batch's values of the leaves."""
        columns = zip(*self._values, strict=True)
        return [
            column[-1] if leaf.batch_dim is None else whole(column, leaf.batch_dim, self._microbatches)
            for leaf, column in zip(self._expression.leaf_info, columns, strict=True)
        ]

    def agrees(
        self,
        loss: torch.Tensor,
        whole_loss: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
    ) -> bool:
        """Whether the shares add up to the whole batch's loss and gradients."""
        if not _close(loss, whole_loss):
            return False
        for leaf, expected, parts in zip(
            self._expression.leaf_info, gradients, zip(*self._gradients, strict=True), strict=True
        ):
            given = [part for part in parts if part is not None]
            if expected is None or not given:
                if (expected is not None and bool(expected.any())) or any(bool(part.any()) for part in given):
                    return False
                continue
            if leaf.batch_dim is not None and len(given) != len(parts):
                return False
            dim = leaf.batch_dim
            split = torch.stack(given).sum(0) if dim is None else whole(given, dim, self._microbatches)
            if not _close(split, expected):
                return False
        return True


def affordable(expression: Expression, device: torch.device) -> bool:
    """Whether the whole batch's values of the leaves, their gradients and what the loss makes of them fit."""
    needed = _COPIES * sum(record.fake.numel() * record.fake.element_size() for record in expression.leaves)
    spare = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _SPARE_BYTES
    return needed <= spare


def _close(split: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = _TOLERANCES.get(expected.dtype, _HALF_TOLERANCE)
    first, second = split.detach().double(), expected.detach().double()
    if not bool(torch.isfinite(second).all()):
        return bool(torch.equal(torch.isfinite(first), torch.isfinite(second)))
    return float((first - second).norm()) <= tolerance * max(float(second.norm()), 1e-30)
