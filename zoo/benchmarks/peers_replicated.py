"""Data parallelism on the same two ranks: DDP, and FSDP2 with each block a unit of its own.

Models: each rank takes half the batch as one piece. Ignores: memory limits, and that the loss is a mean of two means.
"""

from __future__ import annotations

from typing import Any

import torch
from peers_models import ModelCase
from peers_rank import Place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DDP", "FSDP2"]

#: Classes of blocks that hold most of a model's parameters, and are used as a whole.
BLOCKS = ("Block", "Bottleneck", "LlamaDecoderLayer", "BasicTransformerBlock", "ResnetBlock2D")


class _Replicated:
    def __init__(self, case: ModelCase, place: Place, module: nn.Module) -> None:
        self.part = case.part(place.rank, place.num_ranks)
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(self) -> float:
        """A step; the loss of this rank's half."""
        loss = self.part.forward_loss(self.module)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class DDP(_Replicated):
    """One rank of DistributedDataParallel."""

    def __init__(self, case: ModelCase, place: Place) -> None:
        super().__init__(case, place, DistributedDataParallel(case.module))


class FSDP2(_Replicated):
    """One rank of `fully_shard`."""

    def __init__(self, case: ModelCase, place: Place) -> None:
        mesh = init_device_mesh("cpu", (place.num_ranks,))
        blocks: list[Any] = [m for m in case.module.modules() if type(m).__name__ in BLOCKS]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(case.module, mesh=mesh)
        super().__init__(case, place, case.module)
