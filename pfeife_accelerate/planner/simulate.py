"""How long a step takes.

Models: one compute queue per rank; the host's time for each action; latency + bytes/bandwidth for each transfer, one
transfer at a time on each directed link, both directions at once; transfers overlap compute, but for what the devices
themselves copy.
Ignores: contention between links, the optimizer step, receives that are posted late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import Action, ActionKind, Interval, LinkSpec, Machine, Schedule, StageCost, Timeline
from pfeife_accelerate.schedule import Messages, Transfer, transfer_of
from pfeife_accelerate.schedule.lowering import add_sends
from pfeife_accelerate.schedule.messages import Routes

__all__ = ["MessageBytes", "simulate"]


@dataclass(frozen=True, kw_only=True)
class MessageBytes:
    """Sizes of one message of one micro-batch; a tuple of them is aligned with the messages it belongs to."""

    forward_bytes: int
    gradient_bytes: int


def simulate(
    schedule: Schedule,
    stage_costs: Sequence[StageCost],
    messages: Messages,
    message_bytes: Sequence[MessageBytes],
    machine: Machine,
) -> Timeline:
    """Run a schedule (compute-only or lowered) in simulated time; `message_bytes` is aligned with `messages`."""
    if all(action.kind.is_compute for actions in schedule.per_rank for action in actions):
        schedule = add_sends(schedule, messages)
    sizes = {message.route: size for message, size in zip(messages, message_bytes, strict=True)}
    return _Simulation(schedule, stage_costs, Routes(messages, schedule.stage_ranks), sizes, machine).timeline()


class _Simulation:
    """Every order is fixed (of a rank's actions, and of a link's transfers), so times follow without an event queue."""

    def __init__(
        self,
        schedule: Schedule,
        stage_costs: Sequence[StageCost],
        routes: Routes,
        sizes: dict[tuple[int, int], MessageBytes],
        machine: Machine,
    ) -> None:
        self.schedule = schedule
        self.costs = stage_costs
        self.routes = routes
        self.sizes = sizes
        self.machine = machine
        self.needs_forward = schedule.has_forward
        self.ran_s: dict[tuple[bool, int, int], float] = {}  # (is a backward, stage, micro-batch) -> end
        self.arrived_s: dict[Transfer, float] = {}
        self.rank_free_s = [0.0] * schedule.num_ranks
        self.link_free_s: dict[tuple[int, int], float] = defaultdict(float)
        self.takes_s: dict[tuple[bool, int], float] = defaultdict(float)  # (is a backward, stage) -> copying before it
        self.gives_s: dict[tuple[bool, int], float] = defaultdict(float)  # ... and behind it
        self._note_copies()
        self.intervals: list[Interval] = []

    def _note_copies(self) -> None:
        for messages in self.routes.from_stage:
            for message in messages:
                if self.routes.is_local(message):
                    continue
                producer, reader = message.producer_stage, message.reader
                size = self.sizes[message.route]
                link = self._link_of(producer, message.consumer_rank)
                there_s, back_s = link.copy_s(size.forward_bytes), link.copy_s(size.gradient_bytes)
                self.gives_s[False, producer] += there_s
                self.takes_s[False, reader] += there_s
                if message.has_grad:
                    self.gives_s[True, reader] += back_s
                    self.takes_s[True, producer] += back_s

    def _link_of(self, stage: int, peer: int) -> LinkSpec:
        return self.machine.link_of(self.schedule.stage_ranks[stage], peer)

    def timeline(self) -> Timeline:
        position = [0] * self.schedule.num_ranks
        progress = True
        while progress:
            progress = False
            for rank, actions in enumerate(self.schedule.per_rank):
                while position[rank] < len(actions) and self._run(actions[position[rank]], rank):
                    position[rank] += 1
                    progress = True
        if any(p < len(actions) for p, actions in zip(position, self.schedule.per_rank, strict=True)):
            raise PfeifeError(
                id="PF204",
                what="schedule deadlocks: it cannot be simulated",
                where=str(self.schedule.spec),
                hints=("schedule.validate() draws where it hangs",),
            )
        return Timeline(intervals=tuple(sorted(self.intervals, key=lambda i: (i.start_s, i.rank, i.end_s))))

    def _run(self, action: Action, rank: int) -> bool:
        """Give `action` its times, or return False where something it needs has none yet."""
        kind = action.kind
        if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            return True
        if not kind.is_compute:
            self._send(action, rank)
            return True
        ready_s = self._ready_s(action)
        if ready_s is None:
            return False
        start_s = max(ready_s, self.rank_free_s[rank])
        has_messages = kind is not ActionKind.WEIGHT_GRADIENT
        side = kind.is_backward, action.stage
        start_s += self.takes_s[side] if has_messages else 0.0
        end_s = start_s + self._duration_s(kind, self.costs[action.stage], rank)
        free_s = self.rank_free_s[rank] = end_s + (self.gives_s[side] if has_messages else 0.0)
        if has_messages:
            self.ran_s[kind.is_backward, action.stage, action.microbatch] = free_s
        self.intervals.append(Interval(action=action, rank=rank, start_s=start_s, end_s=end_s))
        return True

    def _send(self, action: Action, rank: int) -> None:
        transfer = transfer_of(action)
        size = self.sizes[transfer.producer_stage, transfer.reader]
        pair = (rank, rank if action.peer is None else action.peer)
        start_s = max(self.rank_free_s[rank], self.link_free_s[pair])  # a send follows the compute that made it
        num_bytes = size.gradient_bytes if transfer.is_gradient else size.forward_bytes
        link = self.machine.link_of(*pair)
        end_s = start_s + link.wire_s(num_bytes)
        self.link_free_s[pair] = self.arrived_s[transfer] = end_s
        self.intervals.append(Interval(action=action, rank=rank, start_s=start_s - link.copy_s(num_bytes), end_s=end_s))

    def _ready_s(self, action: Action) -> float | None:
        """When everything that `action` needs from other stages is there, or None."""
        stage, microbatch = action.stage, action.microbatch
        times: list[float | None] = []
        if action.kind is ActionKind.FORWARD:
            for message in self.routes.into_stage[stage]:
                producer = message.producer_stage
                if self.routes.is_local(message):
                    times.append(self.ran_s.get((False, producer, microbatch)))
                else:
                    times.append(self.arrived_s.get(Transfer(False, producer, message.reader, microbatch)))
        elif action.kind.gives_input_gradient:
            if self.needs_forward:
                times.append(self.ran_s.get((False, stage, microbatch)))
            for message in self.routes.from_stage[stage]:
                if message.has_grad and self.routes.is_local(message):
                    times += (self.ran_s.get((True, consumer, microbatch)) for consumer in message.consumer_stages)
                elif message.has_grad:
                    times.append(self.arrived_s.get(Transfer(True, stage, message.reader, microbatch)))
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def _duration_s(self, kind: ActionKind, cost: StageCost, rank: int) -> float:
        device = self.machine.device_of(rank)
        match kind:
            case ActionKind.FORWARD:
                seconds = cost.forward_s
            case ActionKind.BACKWARD:
                seconds = cost.backward_s
            case ActionKind.INPUT_GRADIENT:
                seconds = cost.backward_s - cost.backward_weight_s
            case _:
                seconds = cost.backward_weight_s
        return max(seconds, device.action_s) if device.runs_ahead else seconds + device.action_s
