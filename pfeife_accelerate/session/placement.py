"""Which rank holds which parameter, and giving up the memory of the others.

A parameter lives on the ranks whose stages read it: one, or several if it is tied across stages. Elsewhere the same
Python object becomes one without memory (`capture.elsewhere`). A parameter that the planned graph does not read (a head
for another task, a layer that was skipped) stays on every rank until another graph reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from pfeife_accelerate.runtime.transport import AbstractTransport

_TIE_TAG = 1 << 26


class Placement:
    """Where each parameter and buffer of a model lives in the pipeline."""

    def __init__(
        self,
        stages_of: Mapping[str, tuple[int, ...]],
        stage_ranks: Sequence[int],
        states: Mapping[str, torch.Tensor],
        rank: int,
    ) -> None:
        self.rank = rank
        self.stages_of = dict(stages_of)
        self._stage_ranks = tuple(stage_ranks)
        self.parameters = {n: t for n, t in states.items() if isinstance(t, nn.Parameter)}
        self.buffers = {n: t for n, t in states.items() if not isinstance(t, nn.Parameter)}
        self._derive()

    def _derive(self) -> None:
        rank = self.rank
        self.ranks_of = {
            name: tuple(sorted({self._stage_ranks[s] for s in stages})) for name, stages in self.stages_of.items()
        }
        self.own = {n: p for n, p in self.parameters.items() if rank in self.ranks_of.get(n, (rank,))}
        self.placed = {n: p for n, p in self.own.items() if n in self.ranks_of}
        self.placed_buffers = {n: b for n, b in self.buffers.items() if rank in self.ranks_of.get(n, ())}
        self.shared = {n: p for n, p in self.placed.items() if len(self.ranks_of[n]) > 1}

    def add(self, stages_of: Mapping[str, tuple[int, ...]], give_up: Callable[[str, nn.Parameter], None]) -> bool:
        """Another graph reads parameters and buffers in these stages: place those that have no place yet, if any."""
        new = {name: stages for name, stages in stages_of.items() if name not in self.stages_of}
        if not new:
            return False
        self.stages_of.update(new)
        self._derive()
        for name in new:
            if name in self.parameters and name not in self.own:
                give_up(name, self.parameters[name])
        return True

    def owner(self, name: str) -> int:
        """The rank that answers for a parameter or buffer."""
        return self.ranks_of.get(name, (0,))[0]

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one that counts the parameter in sums over the model."""
        return self.owner(name) == self.rank

    def apply(
        self, device: torch.device, transport: AbstractTransport, give_up: Callable[[str, nn.Parameter], None]
    ) -> None:
        """Move own parameters and all buffers to the device, give up the others, make tied copies equal."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if name in self.own:
                    if parameter.device != device:
                        parameter.data = parameter.data.to(device)
                else:
                    give_up(name, parameter)
            for buffer in self.buffers.values():
                if buffer.device != device:
                    buffer.data = buffer.data.to(device)
            self._equalise(transport)

    def _equalise(self, transport: AbstractTransport) -> None:
        for name, parameter in sorted(self.shared.items()):
            owner, *others = self.ranks_of[name]
            if self.rank == owner:
                for other in others:
                    transport.send(parameter.detach(), other, _TIE_TAG + self.tie_tag(name))
            else:
                receive = transport.post_receive(
                    tuple(parameter.shape),
                    parameter.dtype,
                    parameter.device,
                    owner,
                    _TIE_TAG + self.tie_tag(name),
                )
                parameter.copy_(receive.wait())
        transport.flush()

    def tie_tag(self, name: str) -> int:
        """What messages about a parameter are marked with, less than 2**24."""
        return list(self.parameters).index(name)
