"""Plans kept for the next run: one file for each question that the planner was asked, in a folder of the user's.

Models: files are replaced at once, so that a reader finds the old plan or the new one. A file that cannot be used is
made anew. Ignores: age, and what else the machine was doing when the costs behind a plan were measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pfeife_accelerate.ir import PipelinePlan, from_json, to_json
from pfeife_accelerate.ir.files import write_whole
from pfeife_accelerate.log import get_logger

__all__ = ["PlanCache", "write_plan"]

_LOG = get_logger(__name__)


class PlanCache:
    """The plan that answers one question; the question is all that a plan depends on, by name."""

    def __init__(self, folder: Path, question: Mapping[str, str | int]) -> None:
        text = json.dumps({"version": PipelinePlan.VERSION, **question}, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def read(self, check: Callable[[PipelinePlan], None]) -> PipelinePlan | None:
        """The plan, if there is one that `check` has nothing against (it raises ValueError)."""
        try:
            plan = from_json(self.path.read_text(encoding="utf-8"))
            check(plan)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # PfeifeError is a ValueError
            _LOG.info("the plan kept in %s is made anew: %s", self.path, error)
            return None
        _LOG.info("the plan kept in %s is used", self.path)
        return plan

    def write(self, plan: PipelinePlan) -> None:
        """Keep a plan; a folder that cannot be written costs a line in the log."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_plan(self.path, plan)
        except OSError as error:
            _LOG.info("the plan cannot be kept in %s: %s", self.path, error)


def write_plan(path: Path, plan: PipelinePlan) -> None:
    """Write a plan so that nobody finds half of it."""
    write_whole(path, to_json(plan))
