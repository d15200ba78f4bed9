"""The file that the runtime and other programs read."""

from __future__ import annotations

from pathlib import Path

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import PipelinePlan, to_json

__all__ = ["write_plan"]


def write_plan(path: Path, plan: PipelinePlan) -> None:
    """Write a plan as JSON.

    Raises: PfeifeError PF143 where the file cannot be written.
    """
    try:
        path.write_text(to_json(plan), encoding="utf-8")
    except OSError as error:
        raise PfeifeError(id="PF143", what=f"the plan cannot be written to {path}", why=str(error)) from error
