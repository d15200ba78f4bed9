"""How many micro-batches a call's batch is divided into, and which numbers the planner may choose from.

Models: the plan's number, fewer for a short batch; BatchNorm in training mode needs two rows. A plan that was made for
a batch too short to be divided as wanted says nothing about longer ones.
Ignores: rows that a loss takes together (`divide` heeds them).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.runtime.microbatch import divide
from pfeife_accelerate.session.call import Call

__all__ = ["MicrobatchNumber", "candidates", "fastest", "most_microbatches", "rows_of"]

_LOG = get_logger(__name__)
#: Micro-batches per rank: few keep operations large, many keep ranks busy. The first is tried first.
_PER_RANK = (2, 1, 4, 8)
#: Times of the same operations differ by so much from one measurement to the next: a smaller gain is none.
_NOISE = 0.05
#: No plan fits into memory; the options for the order do not suit that number.
_ABOUT_THE_NUMBER = ("PF302", "PF210")


@dataclass(frozen=True)
class MicrobatchNumber:
    """The number wanted for calls of one model."""

    wanted: int

    @classmethod
    def planned(cls, plugin: PfeifePlugin, plan: PipelinePlan, call: Call) -> MicrobatchNumber:
        """The option's number, or else the plan's, which was made for `call`."""
        if plugin.num_microbatches is not None:
            return cls(plugin.num_microbatches)
        number = plan.spec.num_microbatches
        return cls(max(number, _PER_RANK[0] * plan.num_ranks) if number >= most_microbatches(call) else number)

    def of(self, call: Call) -> int:
        """How many micro-batches this call's batch is divided into."""
        return min(self.wanted, most_microbatches(call))


def most_microbatches(call: Call) -> int:
    """As many as the batch can be divided into."""
    if call.graph.refusal is not None:
        return 1
    # BatchNorm in training mode has no statistics of a single row.
    return max(1, call.batch_size // 2 if call.graph.has_batch_statistics else call.batch_size)


def rows_of(call: Call, number: int) -> int:
    """Rows of the largest micro-batch if there are that many of them, or as many as the batch allows."""
    return divide(call.batch_size, min(number, most_microbatches(call)))[0].count


def candidates(plugin: PfeifePlugin, call: Call, num_ranks: int) -> tuple[int, ...]:
    """Numbers to plan for, the likeliest first."""
    most = most_microbatches(call)
    if plugin.num_microbatches is not None:
        return (min(plugin.num_microbatches, most),)
    return tuple(dict.fromkeys(min(most, per_rank * num_ranks) for per_rank in _PER_RANK))


def fastest(
    plan_for: Callable[[int, float], PipelinePlan],
    numbers: Sequence[int],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> PipelinePlan:
    """The fastest of the plans `plan_for(number, seconds that its measurements may take)`.

    Numbers for which there is not as much time left as the first one took are left out. So is a number for which there
    is no plan, unless there is none for any.
    """
    best: PipelinePlan | None = None
    refusal: PfeifeError | None = None
    start_s, first_s = clock(), 0.0
    for number in numbers:
        begin_s = clock()
        left_s = start_s + budget_s - begin_s
        if begin_s > start_s and left_s < first_s:
            _LOG.info("%d micro-batches are not considered: measuring takes too long", number)
            continue
        try:
            plan = plan_for(number, left_s)
        except PfeifeError as error:
            if error.id not in _ABOUT_THE_NUMBER:
                raise
            refusal = refusal or error
            _LOG.info("%d micro-batches: %s", number, error.what)
            continue
        finally:
            first_s = first_s or clock() - begin_s
        _LOG.info("%d micro-batches: %.1f ms a step", number, plan.estimate_s * 1e3)
        if best is None or plan.estimate_s < best.estimate_s * (1 - _NOISE):
            best = plan
    if best is None:
        assert refusal is not None
        raise refusal
    return best
