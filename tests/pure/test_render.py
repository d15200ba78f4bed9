"""Text for people and for torch's visualiser."""

from pfeife_accelerate.ir import Action
from pfeife_accelerate.schedule import chain_messages, gpipe, lower, one_f_one_b, render, to_csv


def test_transfers_are_left_out_of_the_picture():
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
    assert render(lower(schedule, chain_messages((0, 1)))) == render(schedule)


def test_ranks_are_aligned():
    rows = render(gpipe(num_ranks=11, num_microbatches=1)).splitlines()
    assert rows[0] == "rank  0  0F0 0B0"
    assert rows[10] == "rank 10  10F0 10B0"


def test_csv_has_a_row_for_each_rank():
    assert to_csv(gpipe(num_ranks=2, num_microbatches=2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def test_csv_cells_read_back():
    schedule = one_f_one_b(num_ranks=2, num_microbatches=3)
    rows = [tuple(map(Action.parse, row.split(","))) for row in to_csv(schedule).splitlines()]
    assert tuple(rows) == schedule.per_rank
