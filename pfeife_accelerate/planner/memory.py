"""How much memory each rank needs at most during a step.

Models: parameters with their gradients and optimizer state, activations alive from forward to backward in the actual
order, the workspace of the running stage. Ignores: buffers of transfers, and what the allocator cannot reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfeife_accelerate.ir import ActionKind, MemoryCurve, Schedule, StageCost

__all__ = ["RankMemory", "peak_memory"]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's peak, in bytes, and what it consists of at that moment."""

    params_bytes: int
    state_bytes: int  #: gradients and optimizer state
    activation_bytes: int
    workspace_bytes: int
    limit_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it together."""
        return self.params_bytes + self.state_bytes + self.activation_bytes + self.workspace_bytes


def peak_memory(schedule: Schedule, stage_costs: Sequence[StageCost], *, state_multiplier: float = 4.0) -> MemoryCurve:
    """Peak bytes of every rank.

    `state_multiplier`: bytes of parameter, gradient and optimizer state per byte of parameter (4 = Adam, all in one
    precision).
    """
    keeps_activations = schedule.has_backward
    peaks, statics = [], []
    for rank, actions in enumerate(schedule.per_rank):
        static = sum(round(stage_costs[s].param_bytes * state_multiplier) for s in schedule.stages_of(rank))
        # Backwards alone start from the activations that the forwards of an earlier schedule left.
        alive = 0 if schedule.has_forward else _left_over(schedule, stage_costs, rank)
        peak = static + alive
        for action in actions:
            cost = stage_costs[action.stage]
            if action.kind is ActionKind.FORWARD:
                peak = max(peak, static + alive + cost.saved_bytes + cost.workspace_bytes)
                alive += cost.saved_bytes if keeps_activations else 0
            elif action.kind.is_backward:
                peak = max(peak, static + alive + cost.workspace_bytes)
                # The weight gradient still needs the activations.
                alive -= 0 if action.kind is ActionKind.INPUT_GRADIENT else cost.saved_bytes
        peaks.append(peak)
        statics.append(static)
    return MemoryCurve(peak_bytes=tuple(peaks), static_bytes=tuple(statics))


def _left_over(schedule: Schedule, stage_costs: Sequence[StageCost], rank: int) -> int:
    return sum(stage_costs[stage].saved_bytes for stage in schedule.stages_of(rank)) * schedule.num_microbatches
