"""The file that the runtime and other programs read."""

from __future__ import annotations

from pathlib import Path

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import PipelinePlan, to_json
from pfeife_accelerate.ir.files import write_whole

__all__ = ["check_folder", "write_plan"]


def check_folder(path: Path) -> None:
    """Whether a plan can be written there, asked before it is sought.

    Raises: PfeifeError PF143 where there is no such folder, or a folder of that name.
    """
    if path.is_dir():
        raise PfeifeError(
            id="PF143",
            what=f"the plan cannot be written to {path}",
            why="it is a folder",
            hints=(f"--out {path / 'plan.json'}",),
        )
    if not path.parent.is_dir():
        raise PfeifeError(
            id="PF143",
            what=f"the plan cannot be written to {path}",
            why=f"there is no folder {path.parent}",
            hints=(f"mkdir -p {path.parent}",),
        )


def write_plan(path: Path, plan: PipelinePlan) -> None:
    """Write a plan as JSON: at once, so that nobody reads half of it, where there is a file or nothing yet.

    Raises: PfeifeError PF143 where the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
            path.write_text(to_json(plan), encoding="utf-8")
        else:
            write_whole(path, to_json(plan))
    except OSError as error:
        raise PfeifeError(
            id="PF143", what=f"the plan cannot be written to {path}", why=str(error), hints=("another --out",)
        ) from error
