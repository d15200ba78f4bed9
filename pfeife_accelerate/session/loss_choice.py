"""Whether a loss runs a micro-batch at a time: worked out once for each kind of loss, and put to the proof.

A loss whose operations are new is on trial in its first step: see `trial`. Where its shares do not make up the whole
batch's loss, the exact two-phase order is taken from then on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from pfeife_accelerate.capture.deferred import FAKE_MODE
from pfeife_accelerate.capture.expression import Expression
from pfeife_accelerate.capture.loss import SplitLoss, split
from pfeife_accelerate.capture.loss_states import Refused
from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups
from pfeife_accelerate.log import get_logger, warn_once

_LOG = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LossChoice:
    """`separable` is False for the exact two-phase order; `split` is None if there is nothing to split."""

    separable: bool
    split: SplitLoss | None = None

    def holds_for(self, numbers: tuple[float, ...]) -> bool:
        """Whether an expression with these numbers is computed in this way too."""
        fixed = None if self.split is None else self.split.fixed_numbers
        return fixed is None or repr(fixed) == repr(numbers)  # 0.0 is not -0.0, and nan is nan

    @property
    def groups(self) -> RowGroups:
        """The rows that must stay in one micro-batch."""
        return CONTIGUOUS if self.split is None else self.split.groups


_MOST_KNOWN = 64
"""Losses whose choice is kept: a script has a few; one with a number that changes at every step has no end of them."""


class LossChooser:
    """Choices by the losses' signatures, the latest ones."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._known: OrderedDict[Hashable, LossChoice] = OrderedDict()
        self._proved: dict[Hashable, bool] = {}

    def choose(self, expression: Expression, batch_size: int, num_microbatches: int) -> LossChoice:
        """How to compute this loss over this batch."""
        if num_microbatches == 1:
            return LossChoice(separable=True)
        if self._proved.get(expression.kind) is False:
            return LossChoice(separable=False)
        key = (expression.signature, batch_size)
        choice = self._known.pop(key, None)
        if choice is None or not choice.holds_for(expression.numbers):
            choice = self._work_out(expression, batch_size)
        self._known[key] = choice  # the latest is the last
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return choice

    def is_new(self, expression: Expression) -> bool:
        """Whether a split loss of these operations has not been held against the whole batch's yet."""
        return expression.kind not in self._proved

    def note_verdict(self, expression: Expression, *, is_right: bool) -> None:
        """The outcome of that."""
        self._proved[expression.kind] = is_right
        if not is_right:
            if self._is_strict:
                raise _mismatch(expression)
            where = expression.steps[-1].operation.where if expression.steps else ""
            _LOG.warning(
                "computed a micro-batch at a time, the loss (%s) differs from the whole batch's: this step and the "
                "following ones take the exact two-phase order. Please report this loss: it is a fault of the package.",
                where,
            )

    def _work_out(self, expression: Expression, batch_size: int) -> LossChoice:
        try:
            return LossChoice(separable=True, split=split(expression, FAKE_MODE, batch_size))
        except Refused as refused:
            where = refused.where or (expression.steps[-1].operation.where if expression.steps else "")
            warn_once(
                _LOG,
                f"two-phase {refused.operation} {where}",
                f"the loss does not separate over micro-batches because of {refused.operation} ({where}): "
                "all forwards run first, then the loss over the whole batch, then all backwards. "
                "Gradients are exact; more activations are kept than in the planned order.",
            )
            return LossChoice(separable=False)


def _mismatch(expression: Expression) -> InternalError:
    return InternalError(
        id="PF543",
        what="computed a micro-batch at a time, the loss differs from the whole batch's",
        where=expression.steps[-1].operation.where if expression.steps else None,
        why="a rule for one of its operations is wrong",
        hints=("on_loss_mismatch: fallback takes the exact order instead",),
    )
