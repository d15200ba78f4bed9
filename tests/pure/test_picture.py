"""Timelines as text."""

from __future__ import annotations

from textwrap import dedent

import pytest

from pfeife_accelerate.errors import InternalError
from pfeife_accelerate.ir import Action, Interval, Timeline
from pfeife_accelerate.schedule import picture
from pfeife_accelerate.schedule.picture import cells, draw, legend


def timeline(*rows):
    """A timeline from one text per rank: `0F0|0:2` is an action and when it starts and ends."""
    intervals = []
    for rank, row in enumerate(rows):
        for word in row.split():
            text, _, times = word.rpartition("|")
            start, end = map(float, times.split(":"))
            intervals.append(Interval(action=Action.parse(text), rank=rank, start_s=start, end_s=end))
    return Timeline(intervals=tuple(intervals))


def signs(drawn, columns, num_ranks=2):
    return legend(drawn, cells(drawn, num_ranks=num_ranks, columns=columns))


ONE_F_ONE_B = timeline(
    "0F0|0:2 0F1|2:4 0B0|8:12 0B1|14:18",
    "1F0|2:4 1B0|4:8 1F1|8:10 1B1|10:14",
)


def test_two_ranks_to_scale():
    assert draw(ONE_F_ONE_B, num_ranks=2, width=18 + 9) == dedent("""\
        rank 0 │0-1-....0===..1===│
        rank 1 │..0-0===1-1===....│""")


def test_half_a_backward_has_a_filling_of_its_own():
    halves = timeline("0F0|0:3 0I0|3:6 0W0|6:9")
    assert draw(halves, num_ranks=1, width=18 + 9) == "rank 0 │0-----0+++++0~~~~~│"
    assert signs(halves, 18) == (
        "number of the micro-batch, then - forward, + gradient of values, ~ gradient of parameters, . idle"
    )
    assert signs(ONE_F_ONE_B, 18) == "number of the micro-batch, then - forward, = backward, . idle"


def test_the_width_is_kept_whatever_the_times():
    for width in (40, 77, 120, 200):
        lines = draw(ONE_F_ONE_B, num_ranks=2, width=width).splitlines()
        assert [len(line) for line in lines] == [width, width]


def test_narrow_consoles_get_ten_columns():
    assert [len(line) for line in draw(ONE_F_ONE_B, num_ranks=2, width=5).splitlines()] == [19, 19]


def test_numbers_of_two_digits_are_cut_where_they_leave_no_room():
    long = timeline("0F12|0:4 0B12|4:6 0F7|6:10")
    assert draw(long, num_ranks=1, width=10 + 9) == "rank 0 │12--2=7---│"


def test_narrow_backwards_are_told_from_forwards():
    narrow = timeline("0F0|0:1 0F1|1:2 0B0|2:3 0F2|3:4 0B1|4:6 0I2|6:7 0W2|7:8 0F13|8:10")
    assert draw(narrow, num_ranks=1, width=10 + 9) == "rank 0 │01a21=cC3-│"
    assert signs(narrow, 10).endswith(
        "; a narrow backward is a letter, a for 0; a narrow gradient of parameters a capital, A for 0"
    )
    whole = timeline("0F0|0:1 0B19|1:2 0F1|2:10")
    assert draw(whole, num_ranks=1, width=10 + 9) == "rank 0 │0j1-------│"
    assert signs(whole, 10).endswith("idle; a narrow backward is a letter, a for 0")
    late = timeline("0F0|0:1 0I0|1:4 0W0|4:5 0F1|5:10")
    assert signs(late, 10).endswith("idle; a narrow gradient of parameters a capital, A for 0")


def test_what_is_shorter_than_half_a_column_disappears():
    short = timeline("0F0|0:9.8 0F1|9.8:9.9 0F2|9.9:20")
    assert draw(short, num_ranks=1, width=10 + 9) == "rank 0 │0----2----│"


def test_transfers_are_left_out_and_ranks_may_be_idle():
    sends = timeline("0F0|0:5 0SEND_F0>1@1|5:10", "", "")
    assert draw(sends, num_ranks=3, width=10 + 9).splitlines() == [
        "rank 0 │0----.....│",
        "rank 1 │..........│",
        "rank 2 │..........│",
    ]


def test_ranks_are_aligned():
    assert draw(timeline(*["0F0|0:1"] * 11), num_ranks=11, width=20).splitlines()[::10] == [
        "rank  0 │0---------│",
        "rank 10 │0---------│",
    ]


def test_an_empty_timeline_is_idle():
    assert draw(Timeline(intervals=()), num_ranks=1, width=19) == "rank 0 │..........│"


def test_cells_know_their_kind():
    (line,) = cells(timeline("0F3|0:2 0B3|3:5"), num_ranks=1, columns=5)
    assert [(cell.text, cell.kind and cell.kind.value) for cell in line] == [
        ("3", "F"), ("-", "F"), (".", None), ("3", "B"), ("=", "B"),
    ]  # fmt: skip


def test_every_kind_of_action_is_known():
    with pytest.raises(InternalError, match="PF001"):
        picture._filling("a new kind")
