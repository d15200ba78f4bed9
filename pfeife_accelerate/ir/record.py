"""What each rank noted of one step by its own clock, and how that becomes one timeline.

Models: clocks that differ by an offset which drifts evenly between two readings; a transfer starts by the sender's
clock and ends by the receiver's. Ignores: how readings are taken; routes that take longer in one direction, which move
the offset by up to the reading's error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir.actions import Action, ActionKind
from pfeife_accelerate.ir.timeline import Interval, Timeline

__all__ = ["ClockFit", "ClockReading", "Ping", "RankRecord", "assembled", "reading_of"]

_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Ping:
    """One round trip: sent and received by the own clock, answered in between by the reference clock."""

    sent_ns: int
    answered_ns: int
    received_ns: int


@dataclass(frozen=True, kw_only=True)
class ClockReading:
    """At `at_ns` of the own clock, the reference clock showed `offset_ns` more, give or take `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def reading_of(pings: Iterable[Ping]) -> ClockReading:
    """From the fastest round trip, as in NTP: its answer was made half-way, or at most half of it from there."""
    best = min(pings, key=lambda ping: ping.received_ns - ping.sent_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    error_ns = (best.received_ns - best.sent_ns + 1) // 2
    return ClockReading(at_ns=middle_ns, offset_ns=best.answered_ns - middle_ns, error_ns=error_ns)


@dataclass(frozen=True, kw_only=True)
class ClockFit:
    """A rank's clock as two readings tell it, before and after what was recorded."""

    before: ClockReading
    after: ClockReading

    def to_reference(self, own_ns: float) -> float:
        """A moment of the own clock by the reference clock, in nanoseconds."""
        passed = self.after.at_ns - self.before.at_ns
        drift = (self.after.offset_ns - self.before.offset_ns) / passed if passed else 0.0
        return own_ns + self.before.offset_ns + drift * (own_ns - self.before.at_ns)

    @property
    def error_s(self) -> float:
        """How far off a moment between the readings may be, in seconds."""
        return max(self.before.error_ns, self.after.error_ns) * _S


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's notes of one step, in nanoseconds of its own clock; actions in their text form.

    `compute` are (action, start, end); `sends` (SEND, given to the transport, back from there); `receives` (RECV, since
    when it was waited for, when all of it was there); None: it was waited for all the time.
    """

    rank: int
    compute: tuple[tuple[str, int, int], ...]
    sends: tuple[tuple[str, int, int], ...]
    receives: tuple[tuple[str, int | None, int], ...]
    clock: ClockFit


def assembled(records: Sequence[RankRecord]) -> Timeline:
    """The ranks' notes as one timeline, which starts with the first of all actions.

    Raises: InternalError PF433 where a transfer was sent and not received, or the other way round.
    """
    intervals: list[tuple[Action, int, float, float]] = []
    received: dict[tuple[int, str], tuple[float, float]] = {}
    for record in records:
        fit = record.clock.to_reference
        intervals += ((Action.parse(text), record.rank, fit(start), fit(end)) for text, start, end in record.compute)
        for text, begin, end in record.receives:
            received[record.rank, text] = (-inf if begin is None else fit(begin)), fit(end)
    for record in records:
        fit = record.clock.to_reference
        for text, start, left in record.sends:
            action = Action.parse(text)
            assert action.peer is not None
            waited = received.pop((action.peer, str(_other_side(action, record.rank))), None)
            if waited is None:
                raise InternalError(id="PF433", what=f"rank {action.peer} has not noted that it received {text}")
            intervals.append((action, record.rank, fit(start), _arrival_ns(fit(start), fit(left), *waited)))
    if received:
        rank, text = next(iter(received))
        raise InternalError(id="PF433", what=f"rank {rank} noted {text}, which nobody has sent")
    first_ns = min((start for _, _, start, _ in intervals), default=0.0)
    found = (
        Interval(action=action, rank=rank, start_s=(start - first_ns) * _S, end_s=(end - first_ns) * _S)
        for action, rank, start, end in intervals
    )
    return Timeline(intervals=tuple(sorted(found, key=lambda i: (i.start_s, i.rank, i.end_s))))


def _arrival_ns(start: float, left: float, begin: float, end: float) -> float:
    """When a message could have been there: what a rank takes long after it was sent has lain ready, and what it has
    taken had arrived, also where the sender was interrupted before it noted that the message had left.
    """
    return max(start, end - max(0.0, begin - left))


def _other_side(send: Action, sender: int) -> Action:
    """The RECV of a SEND's receiver."""
    kind = ActionKind.RECV_F if send.kind is ActionKind.SEND_F else ActionKind.RECV_B
    return Action(kind=kind, stage=send.stage, microbatch=send.microbatch, reader=send.reader, peer=sender)
