"""What the Pfeife paper found on ViT-g/14 with 2 and 4 devices, by simulation. More: docs/benchmarks/paper_findings.md.

"Uneven slicing" means cuts found for the order that they are run with. The paper: uneven slicing with prefetch beats
equal slicing; uneven slicing without prefetch is worse; prefetch gains about 8 %, looping about 9 %.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from paper_findings import looping, setting, slicing

MICROBATCHES = 8


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def found(request):
    where = setting(request.param, MICROBATCHES)
    return where, slicing(where)


def test_uneven_slicing_with_prefetch_beats_even_slicing_with_and_without_it(found):
    _, times = found
    assert times.uneven_prefetch_s < 0.97 * min(times.even_s, times.even_prefetch_s)


def test_the_same_uneven_slicing_without_prefetch_loses_against_even_slicing(found):
    _, times = found
    assert times.same_cuts_without_prefetch_s > 1.02 * max(times.even_s, times.even_prefetch_s)


def test_without_prefetch_no_slicing_gains_much_over_the_even_one(found):
    _, times = found
    assert 0.995 * times.even_s < times.uneven_s <= times.even_s


def test_even_slicing_gains_next_to_nothing_by_prefetch(found):
    _, times = found
    assert 0.995 * times.even_s < times.even_prefetch_s <= times.even_s


def test_prefetch_gains(found):
    where, times = found
    print(f"{where.ranks} ranks: prefetch gains {times.prefetch_gain:.1%}")
    assert 0.03 < times.prefetch_gain < 0.10


def test_looping_gains_even_over_the_best_slicing_of_one_loop(found):
    """Equal-time cuts are enough; those found for the order gain more."""
    where, times = found
    two, three = (looping(where, loops, search=False) for loops in (2, 3))
    gain = 1 - three.even_s / times.uneven_prefetch_s
    print(f"{where.ranks} ranks: looping gains {1 - two.even_s / times.uneven_prefetch_s:.1%} and {gain:.1%}")
    assert three.even_s < two.even_s < times.uneven_prefetch_s
    assert 0.03 < gain < 0.15


def test_looping_is_better_still_with_uneven_slicing():
    where = setting(2, MICROBATCHES)
    two = looping(where, 2)
    assert two.uneven_s < 0.985 * two.even_s


def test_the_descent_finds_the_best_single_cut():
    """Of all 405, with and without prefetch."""
    where = setting(2, MICROBATCHES)
    for prefetch in (0, 1):
        seconds = where.time_of(where.one_loop(prefetch))
        best_s = min(seconds((cut,)) for cut in range(1, len(where.graph.nodes)))
        assert seconds(where.uneven_cuts(where.one_loop(prefetch))) == pytest.approx(best_s, rel=1e-4)
