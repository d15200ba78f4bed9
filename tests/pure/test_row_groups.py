"""Groups of rows: every row is in one group, and the rows of groups are those that say so."""

from __future__ import annotations

import pytest

from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups

pytestmark = pytest.mark.pure

GROUPS = [
    CONTIGUOUS,
    RowGroups(parts=2),
    RowGroups(parts=3),
    RowGroups(run=2),
    RowGroups(run=4),
    RowGroups(parts=2, run=3),
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("total", [12, 24])
def test_ranges_list_the_rows_of_the_groups_in_order(groups, total):
    assert groups.fits(total)
    assert groups.fits(total + 1) == (groups == CONTIGUOUS)
    for first in range(groups.number(total)):
        for count in range(1, groups.number(total) - first + 1):
            ranges = groups.ranges(first, count, total)
            rows = [row for start, length in ranges for row in range(start, start + length)]
            assert rows == [row for row in range(total) if first <= groups.group_of(row, total) < first + count]
            assert len(rows) == count * groups.rows_per_group


def test_the_whole_batch_is_one_range():
    assert RowGroups(parts=2).ranges(0, 4, 8) == ((0, 8),)
    assert RowGroups(parts=2).ranges(1, 2, 8) == ((1, 2), (5, 2))
    assert RowGroups(run=2).ranges(1, 2, 8) == ((2, 4),)
