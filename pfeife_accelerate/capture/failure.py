"""A call that could not be captured: the line, the reason, and what to do about it."""

from __future__ import annotations

import re

from torch import nn

from pfeife_accelerate.compat import graph_break_reasons, reads_values
from pfeife_accelerate.errors import PfeifeError

_HINTS = ("rewrite the named line without reading tensor values",)


class CaptureFailure(Exception):
    """A call that could not be captured. `refusal` tells a person so; `cause` is what the model's code raised."""

    def __init__(self, refusal: PfeifeError, cause: Exception | None = None, *, has_begun: bool = True) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.cause = cause
        self.has_begun = has_begun
        """Whether a first piece had been captured: what came after has run on values that were never computed."""


def refused(
    module: nn.Module, why: str | None = None, cause: Exception | None = None, breaks_before: int = 0
) -> PfeifeError:
    """The refusal of a model whose call was not captured; earlier graph breaks are not this call's."""
    breaks = graph_break_reasons(breaks_before) or graph_break_reasons()
    where = "; ".join(breaks[:3]) or _line_of(cause)
    recurrent = sorted({type(m).__name__ for m in module.modules() if isinstance(m, nn.RNNBase)})
    if recurrent:
        return PfeifeError(
            id="PF510",
            what=f"{type(module).__name__} holds recurrent layers ({', '.join(recurrent)}), which are not captured",
            where=where,
            why="they keep a list of their weights beside their parameters, so these cannot be placed on one rank",
            hints=("train the recurrent part without a pipeline",),
        )
    return PfeifeError(
        id="PF510",
        what=f"{type(module).__name__} cannot be captured",
        where=where,
        why=why or _reason(cause),
        hints=_HINTS,
    )


def _reason(cause: Exception | None) -> str:
    if cause is None or reads_values(cause):
        return "it reads the value of a tensor, to branch on it or to compute with it in Python"
    return f"{type(cause).__name__}: {(str(cause).strip() or 'no message').splitlines()[0]}"


def _line_of(cause: Exception | None) -> str | None:
    """The model's source line in what Dynamo raised, or where the exception came from."""
    found = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*([^\n]*)', str(cause))
    if found:
        file, line, code = found[-1]
        return f"{file}:{line}: {code}"
    return None
