"""Which schedule runs next: one rank of the pipeline decides, the others follow, so that all run the same sequence.

The conductor is the rank of the last stage, which computes the loss; before there is a plan, the last rank. It
announces every schedule by a small message before it starts it. A follower runs announced schedules in order, whenever
its script asks for what needs them. Nobody therefore depends on who reads a value first, and a script that reads early
on some ranks only cannot hang:

- a follower that reads before `backward` tells the conductor (a *demand*) and waits for the announcement; the conductor
  serves open demands whenever its script enters this package;
- a conductor that reads before `backward` announces the forward half alone; the rest follows at `backward`;
- a schedule starts when the scripts of all ranks have made its call: until then the conductor serves demands, since a
  rank that has not come so far may be reading a value of an earlier call;
- before an optimizer changes parameters, calls that may still be read run their forward half (`Session.settle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.row_groups import CONTIGUOUS, RowGroups
from pfeife_accelerate.runtime.remote import ControlPlane
from pfeife_accelerate.session.call import Call, Progress
from pfeife_accelerate.session.guess import Guess
from pfeife_accelerate.session.open_calls import OpenCalls
from pfeife_accelerate.session.programs import Run

_SCHEDULE = "schedule"
_TO_LEADER = "to the conductor"


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """One schedule to run: its kind, the call, the values its loss reads, and others that the script may read.

    `seed` is the call's, as taken on the leading rank: another rank's script may have drawn more numbers.
    `groups` are the rows that the loss needs in one micro-batch.
    """

    run: Run
    call: int
    loss_values: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    request: int = 0
    """Which backward of the call it is for."""
    on_trial: bool = False
    """Whether the loss rank compares what it computes with the whole batch's, and tells the others the verdict."""
    guess: Guess | None = None
    """What is differentiated, if no script has called backward yet."""
    seed: int = 0
    """What the random operations derive their seeds from."""
    groups: RowGroups = CONTIGUOUS

    def to_json(self) -> dict[str, Any]:
        """As a message."""
        lists = {"loss_values": list(self.loss_values), "wanted": list(self.wanted)}
        guess = None if self.guess is None else self.guess.to_json()
        numbers = {"call": self.call, "request": self.request, "on_trial": self.on_trial, "seed": self.seed}
        groups = [self.groups.parts, self.groups.run]
        return {"run": self.run.value, **numbers, "guess": guess, "groups": groups, **lists}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Announcement:
        """From a message."""
        guess = None if body["guess"] is None else Guess.from_json(body["guess"])
        return cls(
            run=Run(body["run"]),
            call=int(body["call"]),
            loss_values=tuple(body["loss_values"]),
            wanted=tuple(body["wanted"]),
            request=int(body["request"]),
            on_trial=bool(body["on_trial"]),
            guess=guess,
            seed=int(body["seed"]),
            groups=RowGroups(*body["groups"]),
        )


class _LookUp(Exception):
    """Other messages than the awaited one are to be looked at."""


class Conductor:
    """The order of schedules in one pipeline, as seen by one rank."""

    def __init__(self, control: ControlPlane, first_rank: int, rank: int, num_ranks: int) -> None:
        self.control = control
        self.rank = rank
        self._num_ranks = num_ranks
        self._first_rank = first_rank
        self.lead_from(num_ranks - 1)
        self._waiting: deque[Announcement] = deque()
        self._next_number = 0
        self._not_made: dict[int, set[int]] = {}
        self._evaluating: dict[int, set[int]] = {}
        self._training: set[int] = set()
        self.in_barriers: Callable[[], set[int]] = set
        """The ranks, as the control plane numbers them, that wait in a barrier that this one has not come to."""
        self.waiting_for: int | None = None
        """The rank, as the control plane numbers it, whose message is waited for at this moment."""
        self._demanded: dict[int, set[str]] = {}
        self._starting: set[int] = set()
        self.calls: WeakValueDictionary[int, Call] = WeakValueDictionary()
        self.recent: deque[Call] = deque(maxlen=1)
        """The last finished call, held because a slower rank may still read its values; it cannot be a call behind."""
        others = [first_rank + r for r in range(num_ranks) if r != rank]
        self.open_calls = OpenCalls(control, others)
        self._wanted_now: dict[int, set[str]] = {}
        control.serve("demand", self._note_demand)
        control.serve("value", self._give_value)

    def lead_from(self, rank: int) -> None:
        """Let another rank of the pipeline be the conductor. All ranks do so at once, while no call is under way."""
        self.leader = rank
        self.leads = self.rank == rank
        self._leader = self._first_rank + rank
        self._followers = [self._first_rank + r for r in range(self._num_ranks) if r != rank]

    def register(self, call: Call, *, training: bool) -> None:
        """Make a new call known."""
        self.calls[call.number] = call
        if training:
            self.open_calls.add(call)
            self._training.add(call.number)
        if not self.leads:
            self._tell_made(call.number, training=training)

    def _tell_made(self, number: int, *, training: bool) -> None:
        made: dict[str, Any] = {"made": number, "rank": self.control.rank, "training": training}
        self.control.post([self._leader], _TO_LEADER, made)

    @property
    def last_number(self) -> int:
        """Number of the last call that this rank's script has made."""
        return self._next_number

    def next_number(self) -> int:
        """Number of the next call: the same on all ranks of the pipeline."""
        self._next_number += 1
        return self._next_number

    def demanded(self, call: Call) -> frozenset[str]:
        """On the leading rank: values of this call that others asked for before its backward."""
        return frozenset(self._demanded.get(call.number, ()))

    def is_wanted(self, call: Call, name: str) -> bool:
        """On the leading rank: whether another rank has asked for a value up to this moment."""
        return name in self._wanted_now.get(call.number, ())

    # -------------------------------------------------------------------------------------------- the leading rank

    def gather(self, number: int, serve_demand: Callable[[Call], None]) -> bool:
        """Wait until the scripts of all ranks have made a call; meanwhile do what they wait for.

        Returns: whether they do make it. Ranks that evaluate together with this one, but without the others, are sent
        off to do so alone.
        """
        self._starting.add(number)
        try:
            while True:
                beyond = self.in_barriers()
                self._listen()  # what those ranks sent before they came there has arrived
                missing = self._not_in(number)
                if self._is_alone(number, missing, beyond):
                    return False
                if not missing:
                    return True
                if not self._serve_demands(serve_demand, urgent=True):
                    with suppress(_LookUp):
                        self._note(self._receive(_TO_LEADER, min(missing), partial(self._look_up, missing)))
        finally:
            self._starting.discard(number)

    def _look_up(self, missing: set[int]) -> None:
        if not missing.isdisjoint(self.in_barriers()):
            raise _LookUp

    def _is_alone(self, number: int, missing: set[int], beyond: set[int]) -> bool:
        """Whether this rank's script alone makes a call: the others train where it evaluates (a validation on the main
        process, between two steps), or wait in a barrier that it has not come to.
        """
        trains = number not in self._training and (set(self._followers) - missing - self._evaluating.get(number, set()))
        if not trains and missing.isdisjoint(beyond):
            return False
        if number not in self._training and (alone := self._evaluating.pop(number, None)):
            self._send_alone(number, alone)
        return True

    def _listen(self) -> None:
        while (body := self.control.poll(_TO_LEADER)) is not None:
            self._note(body)

    def meet(
        self,
        *,
        training: bool,
        run: Callable[[Call, Announcement], None],
        serve_demand: Callable[[Call], None],
    ) -> bool:
        """Before a model's first call is captured: whether all ranks' scripts make it, or only this one's."""
        number = self.next_number()
        if self.leads:
            if training:
                self._training.add(number)
            if not self.gather(number, serve_demand):
                self._next_number -= 1
                return False
            self._not_made.pop(number)
            self.announce(Announcement(run=Run.PLAN, call=number))
            return True
        self._tell_made(number, training=training)
        while True:
            announcement = self._next_announcement()
            if announcement.call == number:
                self._next_number -= announcement.run is Run.ALONE
                return announcement.run is Run.PLAN
            run(self._target(announcement), announcement)

    def _missing(self, number: int) -> set[int]:
        """Ranks whose script has not made the call yet."""
        return self._not_made.setdefault(number, set(self._followers))

    def _not_in(self, number: int) -> set[int]:
        """Ranks that have not made the call yet. One that evaluates where this rank trains (a validation on the main
        process, between two steps) does that alone, and makes the call afterwards.
        """
        missing = self._missing(number)
        if number in self._training and (alone := self._evaluating.pop(number, None)):
            self._send_alone(number, alone)
        return missing

    def _send_alone(self, number: int, alone: set[int]) -> None:
        """Let ranks evaluate alone; they make the call with this number afterwards."""
        self._missing(number).update(alone)
        topic, shown = f"batch {number}", []
        while (body := self.control.poll(topic)) is not None:
            shown.append(body)
        for body in [body for body in shown if body["rank"] not in alone]:
            self.control.post([self.control.rank], topic, body)
        self.control.post(alone, _SCHEDULE, Announcement(run=Run.ALONE, call=number).to_json())

    def _serve_demands(self, serve_demand: Callable[[Call], None], *, urgent: bool) -> bool:
        """Run the calls that others read. If it is not urgent, those whose loss is to be expected wait for it: then
        the planned schedule does.
        """
        busy = False
        for number in sorted(self._demanded):
            call = self.calls.get(number)
            is_open = call is not None and call.progress is Progress.PENDING and not call.has_run
            if call is None or not is_open or number in self._starting:
                continue
            if urgent or not call.resolver.foresight.expects(call):
                serve_demand(call)
                busy = True
        return busy

    def _note(self, body: dict[str, Any]) -> None:
        if "made" in body:
            number, rank = int(body["made"]), int(body["rank"])
            self._missing(number).discard(rank)
            if not body["training"]:
                self._evaluating.setdefault(number, set()).add(rank)
        else:
            self._demanded.setdefault(int(body["demand"]), set()).update(body["wanted"])

    def send_off(self, missing: Collection[int]) -> None:
        """While waiting in a barrier, send off ranks that are not there yet but wait in a call that this rank's script
        has passed by (a validation on the main process): they run it alone.
        """
        if not self.leads:
            return
        for number in [n for n in self._not_made if n > self._next_number]:
            alone = [r for r in self._followers if r in missing and r not in self._not_made[number]]
            if not alone:
                continue
            while self.control.poll(f"batch {number}") is not None:
                pass  # what was to be compared with this rank's batch
            del self._not_made[number]
            self._evaluating.pop(number, None)
            self._demanded.pop(number, None)
            self.control.post(alone, _SCHEDULE, Announcement(run=Run.ALONE, call=number).to_json())

    def give_back(self, call: Call) -> None:
        """This rank alone made the call: the others' next call takes its number."""
        self._next_number -= 1
        self.calls.pop(call.number, None)
        self.open_calls.close(call)

    def announce(self, announcement: Announcement) -> None:
        """Tell the followers what runs next."""
        if self._followers:
            self.control.post(self._followers, _SCHEDULE, announcement.to_json())

    # -------------------------------------------------------------------------------------------- the others

    def follow(self, call: Call, progress: Progress, run: Callable[[Call, Announcement], None]) -> None:
        """Run announced schedules until `call` has come as far as `progress`."""
        while call.progress < progress:
            announcement = self._next_announcement()
            run(call if announcement.call == call.number else self._target(announcement), announcement)

    def _next_announcement(self) -> Announcement:
        if not self._waiting:
            self._waiting.append(Announcement.from_json(self._receive(_SCHEDULE, self._leader)))
        return self._waiting.popleft()

    def _target(self, announcement: Announcement) -> Call:
        target = self.calls.get(announcement.call)
        if target is None:
            raise PfeifeError(
                id="PF430",
                what=f"rank {self.rank} has no call number {announcement.call} of the model",
                why="the script called the model, or backward, on some ranks of the pipeline and not on others",
                hints=("call both on all processes; only reading and saving may be done on one",),
            )
        return target

    def demand(self, call: Call) -> None:
        """Tell the leading rank that this call's values are wanted before its backward; returns when it knows.

        If it has started the step already, it cannot have come to the loss, which needs this rank's part: what is
        wanted will be kept.
        """
        self.control.fetch(self._leader, "demand", f"{call.number}/{','.join(call.reachable())}")
        self.control.post([self._leader], _TO_LEADER, {"demand": call.number, "wanted": list(call.reachable())})

    def _receive(self, topic: str, sender: int, end: Callable[[], None] | None = None) -> dict[str, Any]:
        self.waiting_for = sender
        try:
            return self.control.receive(topic, abandon=end)
        finally:
            self.waiting_for = None

    # -------------------------------------------------------------------------------------------- between schedules

    def service(
        self, run: Callable[[Call, Announcement], None], serve_demand: Callable[[Call], None], *, urgent: bool
    ) -> bool:
        """Do what others wait for: run what is announced for calls known here; on the leading rank, serve demands."""
        self.open_calls.listen()
        busy = self._serve(serve_demand, urgent=urgent) if self.leads else self._take_part(run)
        if not self._waiting:
            self.open_calls.free()
        self.open_calls.tell()
        return busy

    def _serve(self, serve_demand: Callable[[Call], None], *, urgent: bool) -> bool:
        self._listen()
        return self._serve_demands(serve_demand, urgent=urgent)

    def _take_part(self, run: Callable[[Call, Announcement], None]) -> bool:
        busy = False
        while (body := self.control.poll(_SCHEDULE)) is not None:
            self._waiting.append(Announcement.from_json(body))
        while self._waiting and (call := self.calls.get(self._waiting[0].call)) is not None:
            run(call, self._waiting.popleft())
            busy = True
        return busy

    def finished(self, call: Call) -> None:
        """Note that a call needs no more schedules."""
        self._demanded.pop(call.number, None)
        self._wanted_now.pop(call.number, None)
        self._not_made.pop(call.number, None)
        self._evaluating.pop(call.number, None)
        self._training.discard(call.number)
        self.open_calls.close(call)
        self.recent.append(call)

    # -------------------------------------------------------------------------------------------- server thread

    def _note_demand(self, key: str) -> torch.Tensor:
        number, _, names = key.partition("/")
        self._wanted_now.setdefault(int(number), set()).update(names.split(","))
        return torch.empty(0)

    def _give_value(self, key: str) -> torch.Tensor | None:
        number, _, name = key.partition("/")
        call = self.calls.get(int(number))
        return None if call is None else call.values.get(name)

    def fetch(self, call: Call, name: str, rank: int) -> torch.Tensor:
        """A whole-batch value that another rank of the pipeline holds."""
        key = f"{call.number}/{name}"
        return self.control.fetch(self._first_rank + rank, "value", key, clock=self.control.clock)
