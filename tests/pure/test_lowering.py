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
    messages_between,
    one_f_one_b,
    render_lowered,
    transfer_of,
)

#: Stages 0..3 on ranks 0 1 0 1; stage 0 also feeds 2 (on its own rank) and 3, with what 1 reads too and with more.
SKIPS = (
    Message(producer_stage=0, consumer_rank=0, consumer_stages=(2,)),
    Message(producer_stage=0, consumer_rank=1, consumer_stages=(1, 3)),
    Message(producer_stage=0, consumer_rank=1, consumer_stages=(3,)),
    Message(producer_stage=1, consumer_rank=0, consumer_stages=(2,)),
    Message(producer_stage=2, consumer_rank=1, consumer_stages=(3,)),
)


def kinds(schedule):
    return {action.kind for actions in schedule.per_rank for action in actions}


def test_golden_chain(golden):
    schedule = one_f_one_b(num_ranks=2, num_microbatches=3)
    assert render_lowered(lower(schedule, chain_messages((0, 1)))) == golden("lowered_1f1b_d2_m3")


def test_golden_skips_are_sent_once_per_first_reader_and_their_gradients_after_the_last_one(golden):
    schedule = gpipe(num_ranks=2, num_microbatches=1, num_loops=2)
    assert render_lowered(lower(schedule, SKIPS)) == golden("lowered_gpipe_d2_m1_v2_skip_0_to_2_and_3")


def test_messages_of_a_stage_and_their_gradients_leave_in_the_order_given_and_stages_may_come_in_any():
    schedule = gpipe(num_ranks=2, num_microbatches=3, num_loops=2)
    of_first, others = SKIPS[:3], SKIPS[3:]
    assert [m.producer_stage for m in SKIPS] == [0, 0, 0, 1, 2]
    assert lower(schedule, SKIPS) == lower(schedule, (*others[::-1], *of_first))
    turned = lower(schedule, (*of_first[::-1], *others))
    sends = [
        [str(a) for a in actions if a.kind in (ActionKind.SEND_F, ActionKind.SEND_B)] for actions in turned.per_rank
    ]
    assert sends[0][:2] == ["0SEND_F0>3@1", "0SEND_F0>1@1"]
    assert sends[1].index("0SEND_B0>3@0") < sends[1].index("2SEND_B0>3@0")


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
    for actions in lowered.per_rank:
        compute_before = 0
        posted = {}
        for action in actions:
            if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                posted[transfer_of(action)] = compute_before
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
    assert row[first : first + 3] == ["1I0", "0SEND_B0>1@0", "1W0"]


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


def test_one_message_for_each_producer_and_first_reader():
    schedule = gpipe(num_ranks=2, num_microbatches=1, num_loops=2)
    with pytest.raises(PfeifeError, match=r"PF201(.|\n)*there is one per stage and first reader"):
        lower(schedule, (*SKIPS, Message(producer_stage=0, consumer_rank=1, consumer_stages=(1,))))


def test_values_go_together_where_the_same_stage_of_a_rank_reads_them_first():
    values = (
        (0, (1,), True),  # for stage 1 alone
        (0, (3, 1), False),  # read on this rank by 1 first
        (0, (3,), False),  # stage 1 does not wait for it
        (0, (2, 3), True),  # rank 0 has it, rank 1 reads it in 3
        (1, (2,), False),
    )
    assert messages_between(values, (0, 1, 0, 1)) == (
        Message(producer_stage=0, consumer_rank=1, consumer_stages=(1, 3), has_grad=True),
        Message(producer_stage=0, consumer_rank=1, consumer_stages=(3,), has_grad=True),
        Message(producer_stage=0, consumer_rank=0, consumer_stages=(2,), has_grad=True),
        Message(producer_stage=1, consumer_rank=0, consumer_stages=(2,), has_grad=False),
    )


def test_the_first_reader_is_the_first_stage_wherever_it_lives():
    """On a V, the last rank reads in 2 and 3, rank 0 in 5: the placement says which stages are one rank's."""
    values = ((1, (2, 3, 5), True), (1, (3,), True), (0, (5, 4), True))
    found = [
        (m.producer_stage, m.reader, m.consumer_rank, m.consumer_stages)
        for m in messages_between(values, (0, 1, 2, 2, 1, 0))
    ]
    assert found == [(0, 4, 1, (4,)), (0, 5, 0, (5,)), (1, 2, 2, (2, 3)), (1, 5, 0, (5,)), (1, 3, 2, (3,))]


@pytest.mark.parametrize(("reader", "peer"), [(None, 1), (1, None), (None, None)])
def test_a_transfer_names_its_reader_and_its_peer(reader, peer):
    action = Action(kind=ActionKind.SEND_F, stage=0, microbatch=0, reader=reader, peer=peer)
    with pytest.raises(PfeifeError, match=f"PF203 transfer {action} does not name its first reader and its peer rank"):
        transfer_of(action)
