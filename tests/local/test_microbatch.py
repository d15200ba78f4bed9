"""Micro-batches of whole groups of rows: sizes, cutting, and putting together in the script's order."""

from __future__ import annotations

import pytest
import torch

from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups
from pfeife_accelerate.runtime.microbatch import divide, take, whole
from pfeife_accelerate.session.conductor import Announcement
from pfeife_accelerate.session.programs import Run

pytestmark = pytest.mark.local

GROUPS = [CONTIGUOUS, RowGroups(parts=2), RowGroups(parts=4), RowGroups(run=2), RowGroups(parts=2, run=2)]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("number", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(("dim", "rows_per_item"), [(0, 1), (1, 1), (0, 3)])
def test_what_is_cut_is_put_together_again(groups, number, dim, rows_per_item):
    microbatches = divide(16, number, groups)
    shape = [4, 4]
    shape[dim] = 16 * rows_per_item
    value = torch.arange(float(shape[0] * shape[1])).view(shape)
    parts = [take(value, dim, rows, rows_per_item) for rows in microbatches]
    assert [part.shape[dim] for part in parts] == [rows.count * rows_per_item for rows in microbatches]
    assert torch.equal(whole(parts, dim, microbatches), value)
    counts = [rows.num_groups for rows in microbatches]
    assert len(microbatches) == min(number, groups.number(16)) and max(counts) - min(counts) <= 1
    assert [rows.index for rows in microbatches] == list(range(len(microbatches)))


def test_halves_are_cut_from_both_halves():
    rows = divide(8, 2, RowGroups(parts=2))[1]
    assert take(torch.arange(8), 0, rows).tolist() == [2, 3, 6, 7]


def test_an_announcement_carries_the_groups():
    announcement = Announcement(run=Run.PLANNED, call=3, loss_values=("a",), groups=RowGroups(parts=2, run=3))
    assert Announcement.from_json(announcement.to_json()) == announcement
