"""This package among the peers: a plain training script under its environment variables.

Models: the loop of any Accelerate script, which knows of no pipeline. The moment of the first operation is noted by a
hook in the executor, only where a benchmark asks for it. Ignores: how plans are made.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate import Accelerator
from peers_models import ModelCase
from peers_rank import Place

__all__ = ["Ours"]


class Ours:
    """One rank: what a script does."""

    def __init__(self, case: ModelCase, place: Place) -> None:
        self.accelerator = Accelerator()
        self.case = case
        optimizer = torch.optim.AdamW(case.module.parameters(), lr=1e-4)
        self.model, self.optimizer = self.accelerator.prepare(case.module, optimizer)
        self.backward_s = self.first_s = 0.0

    def step(self) -> float:
        """A step, with the loss read at its end as for a log."""
        loss = self.case.forward_loss(self.model)
        self.backward_s = time.monotonic()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def plan(self) -> dict[str, Any]:
        """What the planner decided, and what it expects of a step."""
        from pfeife_accelerate import session

        running = session.current()
        assert running is not None, "pfeife_accelerate is on"
        (plan,) = [model.plan for model in running.models]
        assert plan is not None, "a step has been made"
        return {
            "estimate_s": plan.estimate_s,
            "num_microbatches": plan.spec.num_microbatches,
            "family": plan.spec.family.value,
            "num_stages": plan.num_stages,
            "peak_mb": [number / 2**20 for number in plan.peak_bytes],
        }

    def watch_first_operation(self) -> None:
        """From now on, note when a step's first stage operation starts."""
        from pfeife_accelerate.runtime import executor

        run: Any = executor._Run
        forward = run.forward

        def noted(self_: Any, stage: int, microbatch: int) -> None:
            if stage == 0 and microbatch == 0:
                self.first_s = time.monotonic()
            forward(self_, stage, microbatch)

        run.forward = noted

    def last_moments(self) -> tuple[float, float]:
        """Of the last step: when `backward` was called here, and when the first stage started here, or 0."""
        return self.backward_s, self.first_s
