"""Errors say what, where, why, and what to try."""

import pickle

import pytest

from pfeife_accelerate.errors import InternalError, PfeifeError, assert_never, did_you_mean


def test_a_picture_and_labelled_lines():
    error = PfeifeError(
        id="PF204",
        what="schedule deadlocks",
        where="rank 0 │ 0F0\nrank 1 │ 1F0  <- here",
        why="both wait",
        hints=("prefetch_forwards=1", "schedule: gpipe"),
    )
    assert str(error).splitlines() == [
        "PF204 schedule deadlocks",
        "  rank 0 │ 0F0",
        "  rank 1 │ 1F0  <- here",
        "  why    both wait",
        "  try    prefetch_forwards=1",
        "  or     schedule: gpipe",
    ]


def test_a_single_line_of_where_gets_its_label():
    assert str(PfeifeError(id="PF1", what="no", where="train.py:3")) == "PF1 no\n  where  train.py:3"


def test_a_bare_error_is_one_line():
    assert str(PfeifeError(id="PF1", what="no")) == "PF1 no"


def test_is_a_value_error():
    assert issubclass(PfeifeError, ValueError)


@pytest.mark.parametrize("cls", [PfeifeError, InternalError])
def test_survives_pickling_with_its_fields(cls):
    error = cls(id="PF1", what="no", where="here", why="so", hints=("try",))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.id, copy.what, copy.where, copy.why, copy.hints) == ("PF1", "no", "here", "so", ("try",))
    assert str(copy) == str(error)


def test_did_you_mean_ignores_case_and_stays_silent_when_nothing_is_near():
    assert did_you_mean("Loopd", ["gpipe", "looped"]) == "looped"
    assert did_you_mean("xyz", ["gpipe", "looped"]) is None


def test_a_forgotten_case_is_our_fault():
    with pytest.raises(InternalError, match="PF001 unhandled case 3"):
        assert_never(3)
