"""An event-driven simulator of one training step, to judge plans with. It shares no code with the planner's own.

Models: a rank runs its list of actions strictly in order, one at a time, each as soon as what it needs is there. A
directed link between two ranks carries one message at a time, first come first served, for latency + bytes / bandwidth;
messages overlap with computing and with those on other links. A stage that reads on the rank that made a tensor, or
where it was sent for an earlier stage, finds it there. The gradients of a message go back as one message after the last
backward on that rank that adds to them. Backwards are whole (B) or halves (I, then W): gradients leave after I, what
was saved is freed after W. Every rank ends with its part of the optimizer step. Memory: parameters with gradients and
optimizer state; what is saved from the start of a forward to the end of its backward; workspace while it is needed.
Ignores: buffers of messages, host time, contention between links, recomputation.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from pipeline_layout import BACKWARD, FORWARD, WEIGHT, Layout

from pfeife_accelerate.ir import CostGraph, Machine

__all__ = ["Outcome", "simulate", "simulate_layout"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PHASES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One simulated step. `end_s` is when each rank has done its part of the optimizer step."""

    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]  #: computing, without the optimizer step
    peak_bytes: tuple[int, ...]
    link_busy_s: dict[tuple[int, int], float]

    @property
    def makespan_s(self) -> float:
        """When the last rank is done."""
        return max(self.end_s)

    def fits(self, limit_bytes: float) -> bool:
        """Whether no rank needs more than `limit_bytes`."""
        return max(self.peak_bytes) <= limit_bytes


def simulate(
    graph: CostGraph,
    machine: Machine,
    cuts: Sequence[int],
    stage_ranks: Sequence[int],
    per_rank: Sequence[Sequence[str]],
) -> Outcome | None:
    """Run one step; None where the order deadlocks."""
    return simulate_layout(Layout(graph, cuts, stage_ranks, len(per_rank)), machine, per_rank)


def simulate_layout(layout: Layout, machine: Machine, per_rank: Sequence[Sequence[str]]) -> Outcome | None:
    """As `simulate`, where many orders are tried on one layout."""
    return _Step(layout, machine, per_rank).run()


@dataclass(frozen=True)
class _Job:
    letter: str
    phase: int
    stage: int
    microbatch: int


@cache
def _job(text: str) -> _Job:
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not an action of a step")
    stage, letter, microbatch = found.groups()
    return _Job(letter, _PHASES[letter], int(stage), int(microbatch))


class _Link:
    """One direction between two ranks: what is under way, and what waits for it."""

    def __init__(self) -> None:
        self.queue: deque[tuple[float, int, int]] = deque()  # seconds, event, micro-batch; the first one travels
        self.busy_s = 0.0


class _Step:
    def __init__(self, layout: Layout, machine: Machine, per_rank: Sequence[Sequence[str]]) -> None:
        self.layout, self.machine = layout, machine
        self.jobs = [[_job(text) for text in actions] for actions in per_rank]
        self.num_microbatches = _checked(layout, self.jobs)
        self.missing = [list(layout.num_needed) for _ in range(self.num_microbatches)]
        self.position, self.running = [0] * len(per_rank), [False] * len(per_rank)
        self.end_s, self.busy_s = [0.0] * len(per_rank), [0.0] * len(per_rank)
        self.bytes = list(layout.static_bytes)
        self.peak_bytes = list(layout.static_bytes)
        self.links: dict[tuple[int, int], _Link] = {}
        self.queue: list[tuple[float, int, int, _Job | _Link]] = []  # when, tie-break, rank, what
        self.num_queued = 0
        self.outgoing: list[list[int]] = [[] for _ in range(layout.num_stages)]
        self.returning: list[list[int]] = [[] for _ in range(layout.num_stages)]
        for number, message in enumerate(layout.messages):
            self.outgoing[message.producer].append(number)
            for stage in message.contributors:
                self.returning[stage].append(number)
        self.contributing = [
            [len(message.contributors) for message in layout.messages] for _ in range(self.num_microbatches)
        ]

    def run(self) -> Outcome | None:
        for rank in range(len(self.jobs)):
            self._start(rank, 0.0)
        while self.queue:
            now, _, rank, what = heapq.heappop(self.queue)
            if isinstance(what, _Job):
                self._finish(rank, what, now)
            else:
                self._deliver(what, now)
        if any(position < len(jobs) for position, jobs in zip(self.position, self.jobs, strict=True)):
            return None
        return Outcome(
            end_s=tuple(end + step for end, step in zip(self.end_s, self.layout.optimizer_s, strict=True)),
            busy_s=tuple(self.busy_s),
            peak_bytes=tuple(self.peak_bytes),
            link_busy_s={ranks: link.busy_s for ranks, link in self.links.items()},
        )

    def _queue(self, when: float, rank: int, what: _Job | _Link) -> None:
        self.num_queued += 1
        heapq.heappush(self.queue, (when, self.num_queued, rank, what))

    def _start(self, rank: int, now: float) -> None:
        """Start the rank's next job, if it is idle and nothing is missing."""
        if self.running[rank] or self.position[rank] == len(self.jobs[rank]):
            return
        job = self.jobs[rank][self.position[rank]]
        layout, stage = self.layout, job.stage
        if self.missing[job.microbatch][layout.done(job.phase, stage)]:
            return
        self.running[rank] = True
        self.position[rank] += 1
        seconds = layout.seconds[stage][job.letter]
        self.busy_s[rank] += seconds
        before = self.bytes[rank] if job.phase == FORWARD else self.bytes[rank] - layout.saved_bytes[stage]
        self.peak_bytes[rank] = max(self.peak_bytes[rank], before + layout.high_bytes[stage])
        if job.phase == FORWARD:
            self.bytes[rank] += layout.saved_bytes[stage]
        self._queue(now + seconds, rank, job)

    def _finish(self, rank: int, job: _Job, now: float) -> None:
        layout, stage, microbatch = self.layout, job.stage, job.microbatch
        self.running[rank], self.end_s[rank] = False, now
        if job.letter in "BW":
            self.bytes[rank] -= layout.saved_bytes[stage]
        if job.phase == FORWARD:
            for number in self.outgoing[stage]:
                message = layout.messages[number]
                self._send(rank, message.receiver, message.num_bytes, layout.there(number), microbatch, now)
        elif job.phase == BACKWARD:
            for number in self.returning[stage]:
                self.contributing[microbatch][number] -= 1
                if not self.contributing[microbatch][number]:
                    message = layout.messages[number]
                    self._send(rank, message.sender, message.gradient_bytes, layout.back(number), microbatch, now)
        self._happen(layout.done(job.phase, stage), microbatch, now)
        self._start(rank, now)

    def _send(self, sender: int, receiver: int, num_bytes: int, event: int, microbatch: int, now: float) -> None:
        link = self.links.setdefault((sender, receiver), _Link())
        seconds = self.machine.link_of(sender, receiver).transfer_s(num_bytes)
        link.busy_s += seconds
        link.queue.append((seconds, event, microbatch))
        if len(link.queue) == 1:
            self._queue(now + seconds, -1, link)

    def _deliver(self, link: _Link, now: float) -> None:
        _, event, microbatch = link.queue.popleft()
        if link.queue:
            self._queue(now + link.queue[0][0], -1, link)
        self._happen(event, microbatch, now)

    def _happen(self, event: int, microbatch: int, now: float) -> None:
        """Tell those that wait for it, and start what needed nothing else."""
        layout, missing = self.layout, self.missing[microbatch]
        for job in layout.waiting[event]:
            missing[job] -= 1
            if not missing[job]:
                self._start(layout.stage_ranks[job % layout.num_stages], now)


def _checked(layout: Layout, jobs: Sequence[Sequence[_Job]]) -> int:
    """The number of micro-batches, where each runs through every stage exactly once, on the stage's rank."""
    letters: dict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, own in enumerate(jobs):
        for job in own:
            if job.stage >= layout.num_stages or layout.stage_ranks[job.stage] != rank:
                raise ValueError(f"rank {rank} runs stage {job.stage}, which is not its own")
            letters[job.stage, job.microbatch].append(job.letter)
    num_microbatches = 1 + max((microbatch for _, microbatch in letters), default=-1)
    for stage in range(layout.num_stages):
        for microbatch in range(num_microbatches):
            found = "".join(sorted(letters[stage, microbatch]))
            if found not in ("BF", "FIW"):
                raise ValueError(f"stage {stage} runs {found or 'nothing'} with micro-batch {microbatch}")
    return num_microbatches
