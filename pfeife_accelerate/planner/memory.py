"""How much memory each rank needs at most during a step.

Models: parameters with gradients and optimizer state; activations alive from forward to backward in the actual order;
the workspace of the running stage; a message under way on each link, there and back.
Ignores: what the allocator cannot use again, for which `memory_fraction` leaves room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pfeife_accelerate.planner.problem import Floats
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.schedule.order import Order

__all__ = ["MemoryProfile", "RankMemory"]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's peak, in bytes, and what it consists of at that moment."""

    params_bytes: int
    state_bytes: int  #: gradients and optimizer state
    activation_bytes: int
    workspace_bytes: int
    buffer_bytes: int  #: messages under way
    limit_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it together."""
        return self.params_bytes + self.state_bytes + self.activation_bytes + self.workspace_bytes + self.buffer_bytes

    @property
    def excess_bytes(self) -> int:
        """By how much it exceeds what it may use; negative where there is room."""
        return self.peak_bytes - self.limit_bytes


class MemoryProfile:
    """Which activations are alive while each job of an order runs, each different situation once."""

    def __init__(self, order: Order) -> None:
        self._situations = [self._of_rank(order, rank) for rank in range(order.num_ranks)]

    @staticmethod
    def _of_rank(order: Order, rank: int) -> tuple[list[int], Floats, Floats, Floats]:
        """(stages, alive micro-batches of each before the job, stage of a running forward, of a running backward)."""
        jobs = order.jobs[rank]
        kind, stage = np.divmod(jobs // order.num_microbatches, order.num_stages)
        stages = [s for s, owner in enumerate(order.stage_ranks) if owner == rank]
        last_kind = int(kind.max())
        own = stage[:, None] == np.asarray(stages)[None, :]
        change = own * (kind == 0)[:, None] - own.astype(np.int64) * (kind == last_kind)[:, None]
        alive = np.cumsum(change, axis=0) - change
        forward, backward = own & (kind == 0)[:, None], own & (kind > 0)[:, None]
        table = np.unique(np.concatenate((alive, forward, backward), axis=1), axis=0).astype(np.float64)
        n = len(stages)
        return stages, table[:, :n], table[:, n : 2 * n], table[:, 2 * n :]

    def peaks(self, slices: Slices) -> Floats:
        """Peak bytes: a row for each rank, a column for each slicing."""
        rows = [self._needs(rank, slices).max(axis=0) for rank in range(len(self._situations))]
        return np.stack(rows) + slices.state_bytes + slices.buffer_bytes

    def _needs(self, rank: int, slices: Slices) -> Floats:
        stages, alive, forward, backward = self._situations[rank]
        return (
            alive @ slices.saved_bytes[stages]
            + forward @ slices.forward_peak_bytes[stages]
            + backward @ slices.backward_workspace_bytes[stages]
        )

    def items(self, slices: Slices) -> tuple[RankMemory, ...]:
        """What the peak of each rank consists of, for the first slicing."""
        found = []
        for rank, (stages, alive, forward, _) in enumerate(self._situations):
            needs = self._needs(rank, slices)[:, 0]
            worst = int(needs.argmax())
            # A running forward has made what it keeps: that is an activation, the rest of its peak is workspace.
            kept = float((alive + forward)[worst] @ slices.saved_bytes[stages][:, 0])
            params = slices.param_bytes[rank, 0]
            found.append(
                RankMemory(
                    params_bytes=round(params),
                    state_bytes=round(slices.state_bytes[rank, 0] - params),
                    activation_bytes=round(kept),
                    workspace_bytes=round(needs[worst] - kept),
                    buffer_bytes=round(slices.buffer_bytes[rank, 0]),
                    limit_bytes=slices.problem.limit_bytes(rank),
                )
            )
        return tuple(found)
