"""A trace as Chrome's trace events, which ui.perfetto.dev and chrome://tracing draw.

Models: a process for each rank with a row for its computations and one for each directed link, arrows from what was
sent to what was received, steps one after the other; the plan's times beside them, as processes of their own.
Ignores: what those viewers can do beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pfeife_accelerate.ir import ActionKind, Interval, Timeline
from pfeife_accelerate.ir.trace import Trace
from pfeife_accelerate.planner.comparison import own_times, planned_timeline
from pfeife_accelerate.schedule import transfer_of

__all__ = ["chrome_trace"]

Event = dict[str, Any]

_GAP = 0.05  # between steps, as a share of the longest
_COMPUTE, _SEND, _RECEIVE = 0, 1, 1001  # rows; those of links have the number of the other rank added
_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "gradient of values",
    ActionKind.WEIGHT_GRADIENT: "gradient of parameters",
}


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The whole file, to be written as JSON."""
    num_ranks = trace.plan.num_ranks
    steps = [(step.number, step.timeline, planned_timeline(trace.plan, step.num_microbatches)) for step in trace.steps]
    gap_s = _GAP * max(timeline.makespan_s for _, *both in steps for timeline in both)
    events: list[Event] = []
    rows: set[tuple[int, int]] = set()
    begin_s = 0.0
    for number, recorded, planned in steps:
        for first_process, timeline in ((0, recorded), (num_ranks, planned)):
            for event in _events(timeline, first_process, begin_s, number):
                rows.add((event["pid"], event["tid"]))
                events.append(event)
        begin_s += max(recorded.makespan_s, planned.makespan_s) + gap_s
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(rows, num_ranks), *events]}


def _names(rows: set[tuple[int, int]], num_ranks: int) -> Iterator[Event]:
    """Metadata: what processes and rows are called, and their order."""
    for process in sorted({process for process, _ in rows}):
        name = f"rank {process % num_ranks}" + (" as planned" if process >= num_ranks else "")
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for process, row in sorted(rows):
        yield {"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": _row_name(row)}}
        yield {"ph": "M", "pid": process, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}


def _row_name(row: int) -> str:
    if row == _COMPUTE:
        return "compute"
    return f"receive from {row - _RECEIVE}" if row >= _RECEIVE else f"send to {row - _SEND}"


def _events(timeline: Timeline, first_process: int, begin_s: float, step: int) -> Iterator[Event]:
    for interval in timeline.intervals:
        if interval.action.kind.is_compute:
            action = interval.action
            event = _slice(interval, interval.start_s, first_process + interval.rank, _COMPUTE, begin_s)
            kind = _WORDS[action.kind]
            details = {"stage": action.stage, "microbatch": action.microbatch, "step": step}
            yield {**event, "name": str(action), "cat": kind, "args": {"kind": kind, **details}}
    for interval, start_s in own_times(timeline):
        yield from _transfer(interval, start_s, first_process, begin_s, step)


def _transfer(interval: Interval, start_s: float, first_process: int, begin_s: float, step: int) -> Iterator[Event]:
    """What the sender's row shows, what the receiver's row shows, and the arrow between them."""
    action = interval.action
    assert action.peer is not None
    details = {
        "carries": str(transfer_of(action)),
        "step": step,
        "waited for the link, ms": round((start_s - interval.start_s) * 1e3, 6),
    }
    sender = _slice(interval, start_s, first_process + interval.rank, _SEND + action.peer, begin_s)
    receiver = _slice(interval, start_s, first_process + action.peer, _RECEIVE + interval.rank, begin_s)
    for event in (sender, receiver):
        yield {**event, "name": str(action), "cat": "transfer", "args": details}
    # An arrow's ends lie inside the slices that it joins, and have its name, category and id in common.
    flow = {"name": "transfer", "cat": "transfer", "id": f"{first_process} {step} {interval.rank} {action}"}
    yield {**flow, "ph": "s", "pid": sender["pid"], "tid": sender["tid"], "ts": sender["ts"]}
    end_us = receiver["ts"] + receiver["dur"] - min(0.5, receiver["dur"] / 2)
    yield {**flow, "ph": "f", "bp": "e", "pid": receiver["pid"], "tid": receiver["tid"], "ts": end_us}


def _slice(interval: Interval, start_s: float, process: int, row: int, begin_s: float) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "ts": round((begin_s + start_s) * 1e6, 3),
        "dur": round(max(interval.end_s - start_s, 0.0) * 1e6, 3),
    }
