"""Proof that a schedule can run: a dry run over the very lists that the executor will run.

Models: compute in order on each rank; SEND and RECV that never block; compute that waits for what it needs.
Ignores: time, memory, and buffers of finite size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule, ScheduleFamily
from pfeife_accelerate.schedule.messages import Message, Messages, Routes, Transfer, chain_messages, transfer_of

__all__ = ["chain_messages", "is_executable", "validate"]

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


def validate(schedule: Schedule, messages: Messages) -> Schedule:
    """Return the lowered `schedule`, or raise: PF202 compute, PF203 transfers, PF204 deadlock, PF205 pair order.

    `messages` holds every dependency between stages, local hand-overs included.
    """
    routes = Routes(messages, schedule.stage_ranks)
    _check_compute(schedule)
    _check_transfers(schedule, routes)
    run = _DryRun(schedule, routes, with_transfers=True)
    if not run.finished:
        raise _deadlock(schedule, run)
    return schedule


def is_executable(schedule: Schedule, messages: Messages) -> bool:
    """Whether the compute actions of `schedule` can all run in their order; transfers in it are ignored."""
    return _DryRun(schedule, Routes(messages, schedule.stage_ranks), with_transfers=False).finished


# -- every action once, on its rank, in a possible order ---------------------------------------------------------------


def _check_compute(schedule: Schedule) -> None:
    has_forward, has_backward = schedule.has_forward, schedule.has_backward
    kinds: dict[tuple[int, int], list[ActionKind]] = defaultdict(list)
    for rank, actions in enumerate(schedule.per_rank):
        for action in actions:
            stages = (action.stage, action.reader or 0)
            are_stages = all(0 <= stage < schedule.num_stages for stage in stages)
            if not (are_stages and 0 <= action.microbatch < schedule.num_microbatches):
                raise _bad_compute(f"{action} on rank {rank} is outside the schedule", schedule)
            if action.kind.is_compute:
                if schedule.stage_ranks[action.stage] != rank:
                    raise _bad_compute(f"{action} is on rank {rank}, but its stage is not", schedule)
                kinds[action.stage, action.microbatch].append(action.kind)
    backwards = ((ActionKind.BACKWARD,), (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT))
    forward = (ActionKind.FORWARD,) if has_forward else ()
    allowed = {(*forward, *backward) for backward in backwards} if has_backward else {forward}
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found = tuple(kinds[stage, microbatch])
            if found not in allowed:
                names = " ".join(kind.value for kind in found) or "nothing"
                expected = " or ".join(sorted(" ".join(k.value for k in option) for option in allowed))
                raise _bad_compute(
                    f"stage {stage} runs {names} for micro-batch {microbatch}, expected {expected}", schedule
                )


def _bad_compute(what: str, schedule: Schedule) -> PfeifeError:
    return PfeifeError(
        id="PF202",
        what=what,
        where=f"stages on ranks {schedule.stage_ranks}, {schedule.num_microbatches} micro-batches",
        why="each stage runs each micro-batch once, forward first",
    )


# -- every transfer once on both sides, in the same order --------------------------------------------------------------


def _check_transfers(schedule: Schedule, routes: Routes) -> None:
    expected = Counter(_expected_transfers(schedule, routes))
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for rank, actions in enumerate(schedule.per_rank):
        for action in actions:
            if action.kind.is_compute:
                continue
            transfer = transfer_of(action)
            peer = -1 if action.peer is None else action.peer
            if action.kind in _SENDS:
                sent[rank, peer].append(transfer)
            else:
                received[peer, rank].append(transfer)
    for side, pairs in (("sent", sent), ("received", received)):
        counts = Counter(
            transfer for pair, found in pairs.items() for transfer in found if pair == _pair(transfer, routes)
        )
        total = sum(map(len, pairs.values()))
        for transfer in expected.keys() | counts.keys():
            if counts[transfer] != expected[transfer]:
                raise PfeifeError(
                    id="PF203", what=f"{transfer} is {side} {counts[transfer]} times, expected {expected[transfer]}"
                )
        if total != sum(counts.values()):
            raise PfeifeError(id="PF203", what=f"a transfer is {side} by a rank that has no part in it")
    for sender, receiver in sent:
        if sent[sender, receiver] != received[sender, receiver]:
            pairs_in_order = zip(sent[sender, receiver], received[sender, receiver], strict=True)
            first, other = next((s, r) for s, r in pairs_in_order if s != r)
            raise PfeifeError(
                id="PF205",
                what=f"rank {sender} sends {first} where rank {receiver} receives {other}",
                why="receives are matched to sends by their order alone",
            )


def _pair(transfer: Transfer, routes: Routes) -> tuple[int, int]:
    pair = (routes.stage_ranks[transfer.producer_stage], routes.stage_ranks[transfer.reader])
    return (pair[1], pair[0]) if transfer.is_gradient else pair


def _expected_transfers(schedule: Schedule, routes: Routes) -> Iterator[Transfer]:
    directions = [d for d, present in ((False, schedule.has_forward), (True, schedule.has_backward)) if present]
    for messages in routes.from_stage:
        for message in messages:
            for is_gradient in directions:
                if routes.is_local(message) or (is_gradient and not message.has_grad):
                    continue
                for microbatch in range(schedule.num_microbatches):
                    yield Transfer(is_gradient, message.producer_stage, message.reader, microbatch)


# -- the dry run -------------------------------------------------------------------------------------------------------

_Done = tuple[bool, int, int]  # (is a backward, stage, micro-batch)
_Need = tuple[_Done, Transfer | None]  # what must have run, and the transfer that must carry it here


class _DryRun:
    """Run every rank as far as it gets; `position[r]` is the index of the action rank r stops at."""

    def __init__(self, schedule: Schedule, routes: Routes, *, with_transfers: bool) -> None:
        self.routes = routes
        self.with_transfers = with_transfers
        self.needs_forward = schedule.has_forward
        self.lists = schedule.per_rank
        if not with_transfers:
            self.lists = tuple(tuple(a for a in actions if a.kind.is_compute) for actions in self.lists)
        self.done: set[_Done] = set()
        self.sent: set[Transfer] = set()
        self.posted: set[Transfer] = set()
        self.position = [0] * len(self.lists)
        while any([self._advance(rank) for rank in range(len(self.lists))]):
            pass

    @property
    def finished(self) -> bool:
        return all(p == len(actions) for p, actions in zip(self.position, self.lists, strict=True))

    def _advance(self, rank: int) -> bool:
        start, actions = self.position[rank], self.lists[rank]
        position = start
        while position < len(actions) and self.missing(actions[position]) is None:
            self._perform(actions[position])
            position += 1
        self.position[rank] = position
        return position > start

    def _perform(self, action: Action) -> None:
        if action.kind in _SENDS:
            self.sent.add(transfer_of(action))
        elif not action.kind.is_compute:
            self.posted.add(transfer_of(action))
        elif action.kind is not ActionKind.WEIGHT_GRADIENT:
            self.done.add((action.kind.is_backward, action.stage, action.microbatch))

    def missing(self, action: Action) -> _Need | None:
        """The first thing that `action` still waits for."""
        for need in self._needs(action):
            done, transfer = need
            if done not in self.done or (transfer and not (transfer in self.sent and transfer in self.posted)):
                return need
        return None

    def _needs(self, action: Action) -> Iterator[_Need]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD:
            for message in self.routes.into_stage[stage]:
                producer = message.producer_stage
                yield (False, producer, microbatch), self._carrier(False, message, microbatch)
        elif action.kind.gives_input_gradient:
            if self.needs_forward:
                yield (False, stage, microbatch), None
            for message in self.routes.from_stage[stage]:
                if message.has_grad:
                    carrier = self._carrier(True, message, microbatch)
                    for consumer in reversed(message.consumer_stages):
                        yield (True, consumer, microbatch), carrier
        elif action.kind is ActionKind.WEIGHT_GRADIENT:
            yield (True, stage, microbatch), None
        elif action.kind is ActionKind.SEND_F:
            yield (False, stage, microbatch), None
        elif action.kind is ActionKind.SEND_B:
            for message in self.routes.from_stage[stage]:
                if message.reader == action.reader:
                    for consumer in message.consumer_stages:
                        yield (True, consumer, microbatch), None

    def _carrier(self, is_gradient: bool, message: Message, microbatch: int) -> Transfer | None:
        if not self.with_transfers or self.routes.is_local(message):
            return None
        return Transfer(is_gradient, message.producer_stage, message.reader, microbatch)


# -- the picture of a deadlock -----------------------------------------------------------------------------------------


def _deadlock(schedule: Schedule, run: _DryRun) -> PfeifeError:
    waits: dict[int, _Done] = {}
    for rank, actions in enumerate(run.lists):
        if run.position[rank] < len(actions):
            need = run.missing(actions[run.position[rank]])
            assert need is not None
            waits[rank] = need[0]
    guilty = _cycle(waits, run.done, schedule.stage_ranks)
    ran = all(waits[rank] in run.done for rank in guilty)
    reasons = [f"rank {rank} waits for {_name(*waits[rank])}" for rank in guilty]
    width = len(str(len(run.lists) - 1))
    rows = []
    for rank, actions in enumerate(run.lists):
        mark = "  <- here" if rank in guilty else ""
        rows.append(f"rank {rank:>{width}} │ {_row(actions, run.position[rank], waits.get(rank))}{mark}")
    return PfeifeError(
        id="PF204",
        what=f"schedule deadlocks: {', '.join(reasons)}",
        where="\n".join(rows),
        why="its transfer is sent or posted behind the action that needs it"
        if ran
        else "each of these ranks must run something else before the action that another one waits for",
        hints=_hints(schedule),
    )


def _name(is_backward: bool, stage: int, microbatch: int) -> str:
    return f"{stage}B{microbatch}'s gradient" if is_backward else f"{stage}F{microbatch}'s activation"


def _row(actions: tuple[Action, ...], position: int, wait: _Done | None) -> str:
    compute = [str(action) for action in actions[:position] if action.kind.is_compute]
    shown = ([] if len(compute) <= 6 else ["..."]) + compute[-6:]
    if wait is None:
        return " ".join([*shown, "(done)"])
    is_backward, stage, microbatch = wait
    return " ".join([*shown, f"[{actions[position]} waits for {stage}{'B' if is_backward else 'F'}{microbatch}] ..."])


def _cycle(waits: dict[int, _Done], done: set[_Done], stage_ranks: tuple[int, ...]) -> list[int]:
    """The ranks that wait for each other in a ring, or the rank whose need nobody will ever meet."""
    rank = next(iter(waits))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        next_rank = stage_ranks[waits[rank][1]]
        if waits[rank] in done or next_rank not in waits:
            return [rank]
        rank = next_rank
    return sorted(path[path.index(rank) :])


def _hints(schedule: Schedule) -> Iterator[str]:
    spec = schedule.spec
    if spec.family is ScheduleFamily.LOOPED and spec.num_loops > 1:
        if spec.num_microbatches % spec.num_ranks:
            yield f"a number of micro-batches that is a multiple of {spec.num_ranks}"
        if spec.block != spec.num_microbatches:
            yield f"microbatches_per_loop={spec.num_microbatches}"
    yield "schedule: gpipe, which always runs"
