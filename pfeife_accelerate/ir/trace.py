"""A plan, and when its actions really ran in some training steps: a file for people and other programs.

Models: the recorded steps of one pipeline, all ranks on the clock of its first one. Ignores: steps that were not
recorded, and what the ranks did between schedules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.actions import Action
from pfeife_accelerate.ir.codec import decode, encode
from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.ir.timeline import Interval, Timeline

__all__ = ["RecordedStep", "Trace", "trace_from_json", "trace_to_json"]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One step; `per_rank` has (action, start, end) in seconds since the first action of all ranks.

    `clock_error_s`: how far the ranks' clocks may be apart.
    """

    number: int  #: among the planned training steps of the script, from 1
    num_microbatches: int
    clock_error_s: float
    per_rank: tuple[tuple[tuple[str, float, float], ...], ...]

    @classmethod
    def of(cls, timeline: Timeline, *, num_ranks: int, number: int, num_microbatches: int, clock_error_s: float
    ) -> RecordedStep:  # fmt: skip
        """The step of a recorded timeline."""
        return cls(
            number=number,
            num_microbatches=num_microbatches,
            clock_error_s=clock_error_s,
            per_rank=tuple(
                tuple((str(i.action), i.start_s, i.end_s) for i in timeline.intervals if i.rank == rank)
                for rank in range(num_ranks)
            ),
        )

    @property
    def timeline(self) -> Timeline:
        """The step as the simulator would give it."""
        intervals = (
            Interval(action=Action.parse(text), rank=rank, start_s=start_s, end_s=end_s)
            for rank, own in enumerate(self.per_rank)
            for text, start_s, end_s in own
        )
        return Timeline(intervals=tuple(sorted(intervals, key=lambda i: (i.start_s, i.rank, i.end_s))))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A plan and recorded steps that followed it."""

    VERSION: ClassVar[int] = 1

    version: int = 1
    plan: PipelinePlan
    steps: tuple[RecordedStep, ...]


def trace_to_json(trace: Trace) -> str:
    """The trace as JSON."""
    return json.dumps(encode(trace), allow_nan=False) + "\n"


def trace_from_json(text: str, where: str) -> Trace:
    """Read a trace back; `where` names its file.

    Raises: PfeifeError PF168 for anything that is no trace of this version.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise _no_trace(where, f"it is not JSON: {error}") from error
    if not isinstance(data, dict) or not {"plan", "steps", "version"} <= data.keys():
        raise _no_trace(where, "it has no plan with recorded steps")
    if data["version"] != Trace.VERSION:
        raise _no_trace(where, f"it has version {data['version']!r}, and this release reads version {Trace.VERSION}")
    try:
        trace = decode(Trace, data, "trace")
        for step in trace.steps:
            for actions in step.per_rank:
                for text_of_action, _, _ in actions:
                    Action.parse(text_of_action)
    except PfeifeError as error:
        raise _no_trace(where, error.what) from error
    if not trace.steps:
        raise _no_trace(where, "no step was recorded")
    return trace


def _no_trace(where: str, why: str) -> PfeifeError:
    return PfeifeError(
        id="PF168",
        what=f"{where} is not a recorded trace",
        why=why,
        hints=("the option `trace: FILE` makes one, and so does `pfeife trace train.py`",),
    )
