"""What ranks noted becomes one timeline, whatever their clocks show."""

from __future__ import annotations

import random

import pytest

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir.record import ClockFit, ClockReading, Ping, RankRecord, assembled, reading_of

MS = 1_000_000


def reading(at_ns, offset_ns, error_ns=0):
    return ClockReading(at_ns=at_ns, offset_ns=offset_ns, error_ns=error_ns)


def steady(offset_ns, error_ns=0):
    return ClockFit(before=reading(0, offset_ns, error_ns), after=reading(1000 * MS, offset_ns, error_ns))


def record(rank, clock, *, compute=(), sends=(), receives=()):
    return RankRecord(rank=rank, clock=clock, compute=compute, sends=sends, receives=receives)


def texts(timeline):
    return [(str(i.action), i.rank, round(i.start_s * 1e3, 6), round(i.end_s * 1e3, 6)) for i in timeline.intervals]


def two_ranks(shift_ns, clock):
    """Rank 1's clock shows `shift_ns` less than rank 0's."""
    first = record(
        0,
        steady(0),
        compute=(("0F0", 10 * MS, 12 * MS), ("0B0", 20 * MS, 24 * MS)),
        sends=(("0SEND_F0>1@1", 12 * MS, 12 * MS),),
        receives=(("0RECV_B0>1@1", None, 20 * MS),),
    )
    second = record(
        1,
        clock,
        compute=(("1F0", 13 * MS - shift_ns, 15 * MS - shift_ns), ("1B0", 15 * MS - shift_ns, 19 * MS - shift_ns)),
        sends=(("0SEND_B0>1@0", 19 * MS - shift_ns, 19 * MS - shift_ns),),
        receives=(("0RECV_F0>1@0", None, 13 * MS - shift_ns),),
    )
    return assembled([first, second])


def test_a_transfer_begins_at_its_sender_and_ends_at_its_receiver():
    assert texts(two_ranks(0, steady(0))) == [
        ("0F0", 0, 0.0, 2.0),
        ("0SEND_F0>1@1", 0, 2.0, 3.0),
        ("1F0", 1, 3.0, 5.0),
        ("1B0", 1, 5.0, 9.0),
        ("0SEND_B0>1@0", 1, 9.0, 10.0),
        ("0B0", 0, 10.0, 14.0),
    ]


@pytest.mark.parametrize("shift_ns", [-(10**12), -1, 7 * MS, 10**15])
def test_shifted_clocks_give_the_same_timeline(shift_ns):
    assert texts(two_ranks(shift_ns, steady(shift_ns))) == texts(two_ranks(0, steady(0)))


def test_drift_between_two_readings_is_taken_out():
    fit = ClockFit(before=reading(0, 1000), after=reading(1_000_000, 3000))
    assert fit.to_reference(0) == 1000
    assert fit.to_reference(500_000) == 502_000
    assert fit.to_reference(1_000_000) == 1_003_000
    assert ClockFit(before=reading(5, 7), after=reading(5, 7)).to_reference(6) == 13


def test_the_fastest_round_trip_decides():
    slow = Ping(sent_ns=0, answered_ns=900, received_ns=1000)
    fast = Ping(sent_ns=2000, answered_ns=2060, received_ns=2101)
    assert reading_of([slow, fast]) == reading(2050, 10, 51)


def test_the_offset_is_known_to_half_a_round_trip_however_unequal_the_ways():
    chance = random.Random(0)
    for _ in range(200):
        offset = chance.randrange(-(10**15), 10**15)
        pings = []
        for _ in range(20):
            sent, there, back = chance.randrange(10**9), chance.randrange(1, 10**6), chance.randrange(1, 10**6)
            ping = Ping(sent_ns=sent, answered_ns=sent + there + offset, received_ns=sent + there + back)
            pings.append(ping)
        found = reading_of(pings)
        assert abs(found.offset_ns - offset) <= found.error_ns


def test_the_error_is_that_of_the_worse_reading():
    fit = ClockFit(before=reading(0, 0, 20_000), after=reading(1, 0, 50_000))
    assert fit.error_s == pytest.approx(5e-5)


def test_a_transfer_that_only_one_side_noted_is_a_fault_of_ours():
    send = record(0, steady(0), sends=(("0SEND_F0>1@1", 1, 1),))
    with pytest.raises(InternalError, match="PF433 rank 1 has not noted that it received 0SEND_F0>1@1"):
        assembled([send, record(1, steady(0))])
    with pytest.raises(InternalError, match="PF433 rank 1 noted 0RECV_F0>1@0, which nobody has sent"):
        assembled([record(0, steady(0)), record(1, steady(0), receives=(("0RECV_F0>1@0", None, 1),))])


def test_nothing_noted_is_an_empty_timeline():
    assert assembled([record(0, steady(0))]).intervals == ()


@pytest.mark.parametrize(
    ("begin", "end", "arrived"),
    [
        (None, 9, 9),  # it was watched for
        (3, 9, 9),  # the reader was waiting when it was sent
        (20, 22, 7),  # it had lain ready, and took 2 to be taken
        (None, 4, 4),  # the sender was interrupted before it noted that the message had left
        (2, 4, 4),
        (None, 0, 1),  # clocks are not that exact: nothing arrives before it is sent
    ],
)
def test_a_message_that_lies_ready_has_arrived_when_it_could_have_been_taken(begin, end, arrived):
    sender = record(0, steady(0), sends=(("0SEND_F0>1@1", 1, 5),))
    (transfer,) = assembled([sender, record(1, steady(0), receives=(("0RECV_F0>1@0", begin, end),))]).intervals
    assert transfer.end_s == pytest.approx((arrived - 1) * 1e-9)
