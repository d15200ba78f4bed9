"""What the validator refuses, and how it says so."""

from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import Action, Schedule, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.schedule import chain_messages, is_executable, lower, one_f_one_b, validate
from pfeife_accelerate.schedule.lowering import add_sends, place_receives

CHAIN = chain_messages((0, 1))


def drawn(*rows, num_microbatches=1, stage_ranks=(0, 1)):
    """A schedule from its text, valid or not."""
    spec = ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=len(rows), num_microbatches=num_microbatches)
    per_rank = tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)
    return Schedule(spec=spec, per_rank=per_rank, stage_ranks=stage_ranks)


GOOD = ("0F0 0SEND_F0>1@1 0RECV_B0>1@1 0B0", "0RECV_F0>1@0 1F0 1B0 0SEND_B0>1@0")


def test_a_good_list_is_returned_unchanged():
    schedule = drawn(*GOOD)
    assert validate(schedule, CHAIN) is schedule


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0F0 0B0", "1F0 1B0"), "PF202 stage 0 runs F F B for micro-batch 0, expected F B or F I W"),
        (("0B0 0F0", "1F0 1B0"), "PF202 stage 0 runs B F for micro-batch 0"),
        (("0F0", "1F0 1B0"), "PF202 stage 0 runs F for micro-batch 0"),
        (("0F0 0W0 0I0", "1F0 1B0"), "PF202 stage 0 runs F W I"),
        (("0F0 0B0", ""), "PF202 stage 1 runs nothing for micro-batch 0"),
        (("0F0 0B0 1F0", "1B0"), "PF202 1F0 is on rank 0, but its stage is not"),
        (("0F0 0B0", "1F0 1B0 1F7"), "PF202 1F7 on rank 1 is outside the schedule"),
        (("0F0 0B0", "1F0 1B0 2F0"), "PF202 2F0 on rank 1 is outside the schedule"),
        ((GOOD[0].replace("0SEND_F0>1@1 ", ""), GOOD[1]), "PF203 the activation of 0F0 .* is sent 0 times, expected 1"),
        ((GOOD[0] + " 0RECV_B0>1@1", GOOD[1]), "PF203 the gradient for 0F0 .* is received 2 times, expected 1"),
        ((GOOD[0] + " 1SEND_F0>1@1", GOOD[1]), "PF203 a transfer is sent by a rank that has no part in it"),
        ((GOOD[0] + " 0SEND_F0>2@1", GOOD[1]), "PF202 0SEND_F0>2@1 on rank 0 is outside the schedule"),
        ((GOOD[0].replace("F0>1@1", "F0>1@0"), GOOD[1]), "PF203 the activation of 0F0 .* is sent 0 times, expected 1"),
        ((GOOD[0] + " 0RECV_F0>1@1", GOOD[1]), "PF203"),
    ],
)
def test_what_is_refused(rows, message):
    with pytest.raises(PfeifeError, match=message):
        validate(drawn(*rows), CHAIN)


def test_sends_and_receives_of_a_pair_have_one_order():
    rows = (
        "0F0 0SEND_F0>1@1 0F1 0SEND_F1>1@1 0RECV_B0>1@1 0RECV_B1>1@1 0B0 0B1",
        "0RECV_F1>1@0 0RECV_F0>1@0 1F0 1F1 1B0 0SEND_B0>1@0 1B1 0SEND_B1>1@0",
    )
    with pytest.raises(PfeifeError, match=r"PF205 rank 0 sends the activation of 0F0 .* where rank 1 receives .* 0F1"):
        validate(drawn(*rows, num_microbatches=2), CHAIN)


def test_a_deadlock_is_drawn():
    rows = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    schedule = place_receives(add_sends(drawn(*rows, num_microbatches=2), CHAIN), CHAIN)
    assert not is_executable(schedule, CHAIN)
    with pytest.raises(PfeifeError) as error:
        validate(schedule, CHAIN)
    assert str(error.value).splitlines() == [
        "PF204 schedule deadlocks: rank 0 waits for 1B0's gradient, rank 1 waits for 0F1's activation",
        "  rank 0 │ 0F0 [0B0 waits for 1B0] ...  <- here",
        "  rank 1 │ 1F0 [1F1 waits for 0F1] ...  <- here",
        "  why    each of these ranks must run something else before the action that another one waits for",
        "  try    schedule: gpipe, which always runs",
    ]


def test_only_the_ranks_of_the_ring_are_marked():
    rows = ("0F0 0B0", "2F0 1F0 2B0 1B0", "3F0 3B0")
    schedule = drawn(*rows, stage_ranks=(0, 1, 1, 2))
    with pytest.raises(PfeifeError) as error:
        lower(schedule, chain_messages(schedule.stage_ranks))
    assert [line for line in str(error.value).splitlines() if "│" in line] == [
        "  rank 0 │ 0F0 [0B0 waits for 1B0] ...",
        "  rank 1 │ [2F0 waits for 1F0] ...  <- here",
        "  rank 2 │ [3F0 waits for 2F0] ...",
    ]


def test_finished_ranks_and_long_rows_are_shortened():
    forwards = " ".join(f"0F{m}" for m in range(9))
    rows = (forwards, "1F1 1F0 " + " ".join(f"1F{m}" for m in range(2, 9)))
    schedule = place_receives(add_sends(drawn(*rows, num_microbatches=9), CHAIN), CHAIN)
    # Take the one receive away that 1F0 needs and post it after its use.
    row = list(schedule.per_rank[1])
    late = row.pop(row.index(Action.parse("0RECV_F8>1@0")))
    schedule = replace(schedule, per_rank=(schedule.per_rank[0], (*row, late)))
    with pytest.raises(PfeifeError) as error:
        validate(schedule, CHAIN)
    text = str(error.value)
    assert "rank 0 │ ... 0F3 0F4 0F5 0F6 0F7 0F8 (done)" in text
    assert "[1F8 waits for 0F8] ...  <- here" in text


def test_a_receive_posted_after_its_use_is_a_deadlock():
    rows = (GOOD[0], "1F0 0RECV_F0>1@0 1B0 0SEND_B0>1@0")
    with pytest.raises(PfeifeError, match="PF204 schedule deadlocks: rank 1 waits for 0F0's activation\n") as error:
        validate(drawn(*rows), CHAIN)
    assert "why    its transfer is sent or posted behind the action that needs it" in str(error.value)


def test_a_send_before_its_compute_is_a_deadlock():
    rows = ("0SEND_F0>1@1 0F0 0RECV_B0>1@1 0B0", GOOD[1])
    with pytest.raises(PfeifeError, match="PF204 schedule deadlocks: rank 0 waits for 0F0's activation"):
        validate(drawn(*rows), CHAIN)


def test_executable_looks_at_compute_alone():
    schedule = one_f_one_b(num_ranks=2, num_microbatches=3)
    assert is_executable(schedule, CHAIN)
    assert is_executable(lower(schedule, CHAIN), CHAIN)
