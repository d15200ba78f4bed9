"""What a stage hands to another: the dependencies between stages, and which of them are transfers.

Models: values go DIRECTLY from the producing stage to each rank that reads them, once per consuming rank, together
with those that the same stage of it reads first: no stage waits for what only a later one reads. A message whose
consumer rank is the producer's own is a local hand-over. Messages come in the order of their producers, those of one
stage in the order in which it makes the first value of each; so they leave, and so do their gradients. Ignores: sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.actions import Action, ActionKind

__all__ = [
    "Message", "Messages", "Routes", "Transfer", "by_first_reader", "chain_messages", "messages_between",
    "transfer_of",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one stage gives to one rank for the same first reader; `has_grad`: a gradient comes back for it."""

    producer_stage: int
    consumer_rank: int
    consumer_stages: tuple[int, ...]
    has_grad: bool = True

    @property
    def reader(self) -> int:
        """The first stage that reads it: with the producer, it names the message."""
        return min(self.consumer_stages)

    @property
    def route(self) -> tuple[int, int]:
        """What tells the messages of a placement apart: who sends, and which stage reads first."""
        return self.producer_stage, self.reader


Messages = tuple[Message, ...]


class Transfer(NamedTuple):
    """One message of one micro-batch, as it crosses a link in one direction."""

    is_gradient: bool
    producer_stage: int
    reader: int
    microbatch: int

    def __str__(self) -> str:
        """How errors call it."""
        what = "gradient for" if self.is_gradient else "activation of"
        return f"the {what} {self.producer_stage}F{self.microbatch} (stage {self.reader} reads it first)"


def transfer_of(action: Action) -> Transfer:
    """Which transfer a SEND or RECV is one side of."""
    if action.reader is None or action.peer is None:
        raise PfeifeError(id="PF203", what=f"transfer {action} does not name its first reader and its peer rank")
    is_gradient = action.kind in (ActionKind.SEND_B, ActionKind.RECV_B)
    return Transfer(is_gradient, action.stage, action.reader, action.microbatch)


def by_first_reader(stages: Iterable[int], stage_ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Reading stages by rank, under the first of each: the messages that a value read by them is part of."""
    on_rank: dict[int, list[int]] = {}
    for stage in sorted(set(stages)):
        on_rank.setdefault(stage_ranks[stage], []).append(stage)
    return {own[0]: tuple(own) for own in on_rank.values()}


def chain_messages(stage_ranks: Sequence[int], *, has_grad: bool = True) -> Messages:
    """The messages of a plain chain: each stage gives to the next one alone."""
    return tuple(
        Message(producer_stage=stage, consumer_rank=rank, consumer_stages=(stage + 1,), has_grad=has_grad)
        for stage, rank in enumerate(stage_ranks[1:])
    )


def messages_between(values: Iterable[tuple[int, Sequence[int], bool]], stage_ranks: Sequence[int]) -> Messages:
    """The messages that carry values given as (producing stage, reading stages, whether a gradient comes back).

    Values come in the order in which they are made.
    """
    readers: dict[tuple[int, int], set[int]] = {}
    with_grad: set[tuple[int, int]] = set()
    for producer, consumers, has_grad in values:
        for reader, stages in by_first_reader(consumers, stage_ranks).items():
            readers.setdefault((producer, reader), set()).update(stages)
            with_grad |= {(producer, reader)} if has_grad else set()
    return tuple(
        Message(producer_stage=key[0], consumer_rank=stage_ranks[key[1]], consumer_stages=tuple(sorted(together)),
                has_grad=key in with_grad)
        for key, together in sorted(readers.items(), key=lambda item: item[0][0])
    )  # fmt: skip


class Routes:
    """Messages looked up by the stage that gives, reads, or waits for a gradient."""

    def __init__(self, messages: Messages, stage_ranks: Sequence[int]) -> None:
        """Check the messages against the placement; those of a stage stay in the order given."""
        self.stage_ranks = tuple(stage_ranks)
        stages = range(len(self.stage_ranks))
        self.from_stage: tuple[list[Message], ...] = tuple([] for _ in stages)
        self.into_stage: tuple[list[Message], ...] = tuple([] for _ in stages)
        seen: set[tuple[int, int]] = set()
        for message in sorted(messages, key=lambda m: m.producer_stage):
            self._check(message, seen)
            self.from_stage[message.producer_stage].append(message)
            for consumer in message.consumer_stages:
                self.into_stage[consumer].append(message)

    def _check(self, message: Message, seen: set[tuple[int, int]]) -> None:
        owners = {self.stage_ranks[stage] for stage in message.consumer_stages}
        if message.route in seen or owners != {message.consumer_rank} or message.reader <= message.producer_stage:
            raise PfeifeError(
                id="PF201",
                what=f"{message} does not fit the stages",
                where=f"stages live on ranks {self.stage_ranks}",
                why="a message goes to later stages of its consumer rank, and there is one per stage and first reader",
            )
        seen.add(message.route)

    def is_local(self, message: Message) -> bool:
        """Whether producer and consumers share a rank: nothing is sent."""
        return self.stage_ranks[message.producer_stage] == message.consumer_rank

    def gradients_from(self, stage: int) -> Iterator[Message]:
        """Remote messages whose gradient `stage` contributes to, in the order of their producers."""
        for message in self.into_stage[stage]:
            if message.has_grad and not self.is_local(message):
                yield message
