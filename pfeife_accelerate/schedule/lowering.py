"""From compute-only schedules to lists that a rank can execute: named passes, each from Schedule to Schedule.

Models: sends directly behind what they send; receives posted ahead of their use, in the sender's order on each
directed pair of ranks, because that order is all that a transport needs to match them.
Ignores: sizes and time. A RECV only POSTS the receive; the compute action that needs it waits.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Protocol

from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule
from pfeife_accelerate.schedule.messages import Message, Messages, Routes, Transfer, transfer_of
from pfeife_accelerate.schedule.validate import validate

__all__ = ["DEFAULT_LOOKAHEAD", "LOWERING", "Message", "Messages", "add_sends", "lower", "place_receives"]

#: Compute actions between a posted receive and its use: far enough to hide latency, near enough to hold little memory.
DEFAULT_LOOKAHEAD = 2


class LoweringPass(Protocol):
    """What a pass is."""

    def __call__(self, schedule: Schedule, messages: Messages, *, lookahead: int) -> Schedule:
        """Return the changed schedule."""


def add_sends(schedule: Schedule, messages: Messages, *, lookahead: int = DEFAULT_LOOKAHEAD) -> Schedule:
    """Put a SEND_F behind each producing forward and a SEND_B behind the last backward a gradient needs.

    A gradient leaves once per message: behind the LAST backward, in that rank's order, of its consumer stages.
    """
    routes = Routes(messages, schedule.stage_ranks)
    return replace(
        schedule,
        per_rank=tuple(_with_sends(actions, routes) for actions in schedule.per_rank),
    )


def _with_sends(actions: tuple[Action, ...], routes: Routes) -> tuple[Action, ...]:
    left: dict[Transfer, int] = {}  # backwards still missing for a gradient
    result: list[Action] = []
    for action in actions:
        result.append(action)
        if action.kind is ActionKind.FORWARD:
            result += (
                replace(action, kind=ActionKind.SEND_F, reader=message.reader, peer=message.consumer_rank)
                for message in routes.from_stage[action.stage]
                if not routes.is_local(message)
            )
        elif action.kind.gives_input_gradient:
            for message in routes.gradients_from(action.stage):
                gradient = Transfer(True, message.producer_stage, message.reader, action.microbatch)
                left[gradient] = left.get(gradient, len(message.consumer_stages)) - 1
                if left[gradient] == 0:
                    result.append(
                        Action(
                            kind=ActionKind.SEND_B,
                            stage=message.producer_stage,
                            microbatch=action.microbatch,
                            reader=message.reader,
                            peer=routes.stage_ranks[message.producer_stage],
                        )
                    )
    return tuple(result)


def place_receives(schedule: Schedule, messages: Messages, *, lookahead: int = DEFAULT_LOOKAHEAD) -> Schedule:
    """Post each receive `lookahead` compute actions before its use, or earlier where the pair's order asks for it."""
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)  # (sender, receiver) -> in the sender's order
    for sender, actions in enumerate(schedule.per_rank):
        for action in actions:
            if not action.kind.is_compute and action.peer is not None:
                sent[sender, action.peer].append(transfer_of(action))
    routes = Routes(messages, schedule.stage_ranks)
    per_rank = tuple(
        _with_receives(actions, {s: t for (s, receiver), t in sent.items() if receiver == rank}, routes, lookahead)
        for rank, actions in enumerate(schedule.per_rank)
    )
    return replace(schedule, per_rank=per_rank)


def _with_receives(
    actions: tuple[Action, ...], incoming: dict[int, list[Transfer]], routes: Routes, lookahead: int
) -> tuple[Action, ...]:
    needed_at = _first_uses(actions, routes)
    num_compute = sum(action.kind.is_compute for action in actions)
    posts: dict[int, list[Action]] = defaultdict(list)  # index of a compute action -> receives posted before it
    for sender, transfers in sorted(incoming.items()):
        slot = num_compute
        slots: list[int] = []
        for transfer in reversed(transfers):  # from the back: nobody may be posted after its successor
            slot = min(slot, max(0, needed_at.get(transfer, num_compute) - lookahead))
            slots.append(slot)
        for transfer, slot in zip(transfers, reversed(slots), strict=True):
            kind = ActionKind.RECV_B if transfer.is_gradient else ActionKind.RECV_F
            posts[slot].append(
                Action(
                    kind=kind,
                    stage=transfer.producer_stage,
                    microbatch=transfer.microbatch,
                    reader=transfer.reader,
                    peer=sender,
                )
            )
    result: list[Action] = []
    index = 0
    for action in actions:
        if action.kind.is_compute:
            result += posts[index]
            index += 1
        result.append(action)
    return (*result, *posts[index])


def _first_uses(actions: tuple[Action, ...], routes: Routes) -> dict[Transfer, int]:
    """For each transfer into this rank, the index among its compute actions of the first one that needs it."""
    uses: dict[Transfer, int] = {}
    compute = (action for action in actions if action.kind.is_compute)
    for index, action in enumerate(compute):
        if action.kind is ActionKind.FORWARD:
            for message in routes.into_stage[action.stage]:
                uses.setdefault(Transfer(False, message.producer_stage, message.reader, action.microbatch), index)
        elif action.kind.gives_input_gradient:
            for message in routes.from_stage[action.stage]:
                uses.setdefault(Transfer(True, action.stage, message.reader, action.microbatch), index)
    return uses


LOWERING: tuple[LoweringPass, ...] = (add_sends, place_receives)


def lower(schedule: Schedule, messages: Messages, *, lookahead: int = DEFAULT_LOOKAHEAD) -> Schedule:
    """Run all passes on a compute-only schedule and prove that the result can run.

    A schedule with forwards or backwards alone gets the transfers of that half.
    """
    for lowering_pass in LOWERING:
        schedule = lowering_pass(schedule, messages, lookahead=lookahead)
    return validate(schedule, messages)
