"""One process with one thread, as a script without any of the tools; and how long each unit takes in it.

Models: the whole batch at once, or accumulation over micro-batches with the loss divided by their number. Ignores: the
second core, which is idle.
"""

from __future__ import annotations

import time

import torch
from peers_models import ModelCase
from peers_rank import Place
from peers_units import units_of
from torch import Tensor

__all__ = ["Plain", "Profile"]

REPETITIONS = 3


class Plain:
    """The reference."""

    def __init__(self, case: ModelCase, place: Place) -> None:
        number = place.num_microbatches or 1
        self.module = case.module
        self.parts = [case.part(index, number) for index in range(number)]
        self.optimizer = torch.optim.AdamW(case.module.parameters(), lr=1e-4)

    def step(self) -> float:
        """A step."""
        total = 0.0
        for part in self.parts:
            loss = part.forward_loss(self.module) / len(self.parts)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Profile:
    """Seconds of each unit for one micro-batch: what a hand-made split is balanced by."""

    def __init__(self, case: ModelCase, place: Place) -> None:
        self.number = place.num_microbatches or 1
        self.case, self.part = case, case.part(0, self.number)
        self.units = units_of(case)

    def step(self) -> None:
        """There is nothing to train here."""

    def unit_seconds(self) -> list[float]:
        """Forward, backward, and the unit's share of the optimizer's step over a micro-batch."""
        seconds = [float("inf")] * len(self.units)
        for _ in range(REPETITIONS):
            seconds = [min(pair) for pair in zip(seconds, self._once(), strict=True)]
        optimizer = torch.optim.AdamW(self.case.module.parameters(), lr=1e-4)
        optimizer.step()  # makes its state
        start_s = time.thread_time()
        optimizer.step()
        elements = sum(p.numel() for p in self.case.module.parameters())
        per_element_s = (time.thread_time() - start_s) / elements / self.number
        shares = [per_element_s * sum(p.numel() for p in unit.parameters()) for unit in self.units]
        return [a + b for a, b in zip(seconds, shares, strict=True)]

    def _once(self) -> list[float]:
        state: tuple[Tensor, ...] = self.part.inputs
        found = []
        for index, unit in enumerate(self.units):
            state = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in state)
            start_s = time.thread_time()
            state = unit(state, self.part.conditions)
            if index == len(self.units) - 1:
                torch.autograd.backward(self.part.loss(state[0], self.part.target))
            else:
                made = [value for value in state if value.requires_grad]
                torch.autograd.backward(made, [torch.ones_like(value) for value in made])
            found.append(time.thread_time() - start_s)
        return found
