"""The fidelity table: one row for each case and number of ranks, as Markdown.

Models: what was found, with what it was found. Ignores: how it was found.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from fidelity_compare import TOLERANCES, Comparison
from fidelity_kit import Case

_PACKAGES = ("torch", "accelerate", "transformers", "diffusers", "timm", "torchvision", "peft", "numpy")
_COLUMNS = (
    "case", "exercises", "model", "loss", "ranks", "dtype", "schedule", "gradient error", "loss error", "order",
    "verdict",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case on one number of ranks."""

    case: Case
    size: int
    comparison: Comparison | None = None
    order: str = ""
    failure: str = ""

    @property
    def verdict(self) -> str:
        """In a word, or with the reason."""
        if self.failure:
            return f"**fails**: {self.failure}"
        if self.comparison is None:
            return f"pending: {self.case.pending}"
        if self.comparison.problems:
            return f"**differs**: {self.comparison.problems[0]}"
        return "equal" if not self.case.stated else f"equal to {self.case.stated}"

    @property
    def kind(self) -> str:
        """The verdict without reasons."""
        kind, as_stated, _ = self.verdict.partition(":")[0].partition(" to ")
        return f"{kind} as stated" if as_stated else kind.strip("*")


def order_of(kinds: Sequence[str]) -> str:
    """In which order the training steps ran, out of the kinds of schedules that were announced."""
    found = [name for kind, name in (("planned", "planned"), ("backward", "two-phase")) if kind in kinds]
    return " and ".join(found) or "-"


def markdown(rows: Sequence[Row], command: str) -> str:
    """The whole document."""
    head = [
        "# Fidelity",
        "",
        "Each case is the body of a plain training script. It ran once as one plain process without the package, and "
        "once as a pipeline; all that both recorded was compared: losses, values read, gradients, parameters. The "
        "error of a gradient is the norm of the difference over the norm of the plain process's gradient, the largest "
        "over all parameters and recorded steps. Allowed are "
        + ", ".join(f"{t.gradients:g} in {_short(d)}" for d, t in TOLERANCES.items())
        + ". Where the promise is another than equality with the whole batch, the verdict says what was compared.",
        "",
        "`order` says whether the micro-batches ran in the planned order, or all forwards, the whole loss and all "
        "backwards in two phases. A pending row is a case of what does not work yet, with the reason; it was not run.",
        "",
        "This file is generated; do not edit it.",
        "",
        f"- command: `{command}`",
        f"- {', '.join(_versions())}; Python {platform.python_version()}, {platform.machine()}, gloo on CPU",
        f"- {summary(rows)}",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    return "\n".join([*head, *map(_line, rows)]) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """How many rows of each verdict."""
    counts = Counter(row.kind for row in rows)
    combinations = {(row.case.model, row.case.loss, row.case.exercises) for row in rows if row.comparison is not None}
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return f"{len(rows)} rows: {kinds}; {len(combinations)} combinations of model, loss and feature ran"


def _line(row: Row) -> str:
    case, found = row.case, row.comparison
    errors = [None, None] if found is None else [found.gradient_error, found.loss_error]
    cells = [
        case.name,
        case.exercises,
        case.model,
        case.loss,
        str(row.size),
        _short(case.dtype) if case.precision == "no" else f"{_short(case.dtype)}, autocast {case.precision}",
        _schedule(case),
        *("-" if error is None else f"{error:.1e}" for error in errors),
        row.order or "-",
        row.verdict,
    ]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _schedule(case: Case) -> str:
    micro = case.options.get("num_microbatches", "auto")
    return f"{case.options.get('schedule', 'auto')}, {micro} micro-batches"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    return found
