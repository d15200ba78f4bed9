"""Transfers: who sends when, and where the other side posts its receive."""

from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import Action, ActionKind
from pfeife_accelerate.schedule import (
    Message,
    backward_only,
    chain_messages,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    render_lowered,
    transfer_of,
)

#: Stages 0..3 on ranks 0 1 0 1; stage 0 also feeds 2 (on its own rank) and 3 (on the rank that reads it anyway).
SKIPS = (
    Message(producer_stage=0, consumer_rank=0, consumer_stages=(2,)),
    Message(producer_stage=0, consumer_rank=1, consumer_stages=(1, 3)),
    Message(producer_stage=1, consumer_rank=0, consumer_stages=(2,)),
    Message(producer_stage=2, consumer_rank=1, consumer_stages=(3,)),
)


def kinds(schedule):
    return {action.kind for actions in schedule.per_rank for action in actions}


def test_golden_chain(golden):
    schedule = one_f_one_b(num_ranks=2, num_microbatches=3)
    assert render_lowered(lower(schedule, chain_messages((0, 1)))) == golden("lowered_1f1b_d2_m3")


def test_golden_skip_is_sent_once_per_rank_and_its_gradient_after_the_last_reader(golden):
    schedule = gpipe(num_ranks=2, num_microbatches=1, num_loops=2)
    assert render_lowered(lower(schedule, SKIPS)) == golden("lowered_gpipe_d2_m1_v2_skip_0_to_2_and_3")


def test_the_order_of_messages_does_not_matter():
    schedule = gpipe(num_ranks=2, num_microbatches=3, num_loops=2)
    assert lower(schedule, SKIPS) == lower(schedule, SKIPS[::-1])


def test_each_half_has_its_own_transfers_only():
    schedule = gpipe(num_ranks=2, num_microbatches=2, num_loops=2)
    forward, backward = (lower(half(schedule), SKIPS) for half in (forward_only, backward_only))
    assert kinds(forward) == {ActionKind.FORWARD, ActionKind.SEND_F, ActionKind.RECV_F}
    assert kinds(backward) == {ActionKind.BACKWARD, ActionKind.SEND_B, ActionKind.RECV_B}


def test_a_message_without_gradient_is_not_answered():
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
    lowered = lower(schedule, chain_messages((0, 1), has_grad=False))
    assert kinds(lowered) == {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.SEND_F, ActionKind.RECV_F}


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5, 100])
def test_receives_are_at_least_the_lookahead_ahead_of_their_use(lookahead):
    schedule = one_f_one_b(num_ranks=3, num_microbatches=4, prefetch_forwards=1)
    lowered = lower(schedule, chain_messages((0, 1, 2)), lookahead=lookahead)
    for rank, actions in enumerate(lowered.per_rank):
        compute_before = 0
        posted = {}
        for action in actions:
            if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                posted[transfer_of(action, rank)] = compute_before
            compute_before += action.kind.is_compute
        order = [str(a) for a in actions if a.kind.is_compute]
        for transfer, at in posted.items():
            is_gradient, producer, _, microbatch = transfer
            use = f"{producer}B{microbatch}" if is_gradient else f"{producer + 1}F{microbatch}"
            assert at <= max(0, order.index(use) - lookahead)


def test_the_split_backward_sends_after_the_input_gradient():
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
    split = tuple(
        tuple(
            part
            for action in actions
            for part in (
                (replace(action, kind=ActionKind.INPUT_GRADIENT), replace(action, kind=ActionKind.WEIGHT_GRADIENT))
                if action.kind is ActionKind.BACKWARD
                else (action,)
            )
        )
        for actions in schedule.per_rank
    )
    lowered = lower(replace(schedule, per_rank=split), chain_messages((0, 1)))
    row = [str(action) for action in lowered.per_rank[1]]
    first = row.index("1I0")
    assert row[first : first + 3] == ["1I0", "0SEND_B0@0", "1W0"]


def test_messages_must_fit_the_stages():
    schedule = one_f_one_b(num_ranks=2, num_microbatches=1)
    for wrong in (
        Message(producer_stage=1, consumer_rank=0, consumer_stages=(0,)),
        Message(producer_stage=0, consumer_rank=0, consumer_stages=(1,)),
    ):
        with pytest.raises(PfeifeError, match="PF201"):
            lower(schedule, (wrong,))
    with pytest.raises(PfeifeError, match="PF201"):
        lower(schedule, chain_messages((0, 1)) * 2)


def test_a_transfer_names_its_peer():
    with pytest.raises(PfeifeError, match="PF203 transfer 0SEND_F0 of rank 0 names no peer rank"):
        transfer_of(Action.parse("0SEND_F0"), 0)
