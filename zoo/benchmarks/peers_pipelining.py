"""`torch.distributed.pipelining` over stages cut by hand.

Models: what its documentation tells a user to write, with the schedule's own handling of losses. Ignores: its tracer,
which cannot run the U-Net.
"""

from __future__ import annotations

from typing import Any

import torch
from peers_entries import ORDERS
from peers_models import ModelCase
from peers_rank import Place
from peers_units import Stage, units_of
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

__all__ = ["Pipelining"]


class Pipelining:
    """One rank."""

    def __init__(self, case: ModelCase, place: Place) -> None:
        order = ORDERS[place.options["order"]]
        ranks = order.ranks(place.num_ranks)
        mine = [stage for stage, rank in enumerate(ranks) if rank == place.rank]
        units, bounds = units_of(case), place.options["bounds"]
        modules = [Stage(units[bounds[s] : bounds[s + 1]], solid=case.name == "unet") for s in mine]
        stages = [
            pipelining.PipelineStage(module, stage, len(ranks), torch.device("cpu"))
            for module, stage in zip(modules, mine, strict=True)
        ]
        kind: Any = getattr(schedules, order.schedule)
        self.schedule = kind(
            stages if order.per_rank > 1 else stages[0], n_microbatches=place.num_microbatches, loss_fn=case.loss
        )
        self.inputs = case.inputs if 0 in mine else ()
        self.conditions = case.conditions
        self.target = case.target if len(ranks) - 1 in mine else None
        self.optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-4)

    def step(self) -> float | None:
        """A step; the loss is the mean of the micro-batches' losses."""
        losses: list[torch.Tensor] = []
        last = {} if self.target is None else {"target": self.target, "losses": losses}
        self.schedule.step(*self.inputs, return_outputs=False, **last, **self.conditions)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses]).mean().item() if losses else None
