"""DeepSpeed's pipeline over the same stages cut by hand (optional: `pip install deepspeed`, with DS_BUILD_OPS=0).

Models: `PipelineModule` with one layer a stage. Conditions travel inside the tuple from stage to stage, as it has no
other way for them, and require gradients, since it sends one for each tensor of the tuple. Ignores: ZeRO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger
from peers_models import ModelCase
from peers_rank import Place
from peers_units import Stage, units_of
from torch import Tensor, nn

__all__ = ["DeepSpeed"]


class DeepSpeed:
    """One rank."""

    def __init__(self, case: ModelCase, place: Place) -> None:
        assert place.num_microbatches is not None
        logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        units, bounds = units_of(case), place.options["bounds"]
        names = tuple(case.conditions)
        layers = [
            _Layer(Stage(units[bounds[s] : bounds[s + 1]], solid=case.name == "unet"), names, s, place.num_ranks)
            for s in range(place.num_ranks)
        ]
        net = PipelineModule(
            layers=layers,
            num_stages=place.num_ranks,
            loss_fn=case.loss,
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        parameters = [p for p in net.parameters() if p.requires_grad]
        number = place.num_microbatches
        self.engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(parameters, lr=1e-4),
            model_parameters=parameters,
            config={
                "train_batch_size": case.rows,
                "train_micro_batch_size_per_gpu": case.rows // number,
                "gradient_accumulation_steps": number,
                "steps_per_print": 10**9,
                "zero_allow_untested_optimizer": True,
                "wall_clock_breakdown": False,
            },
        )
        parts = [case.part(index, number) for index in range(number)]
        self.data = [((*part.inputs, *part.conditions.values()), part.target) for part in parts]

    def step(self) -> float:
        """A step."""
        return float(self.engine.train_batch(data_iter=self._batches()))

    def _batches(self) -> Iterator[tuple[Any, Tensor]]:
        for tensors, target in self.data:
            yield (tensors if len(tensors) > 1 else tensors[0]), target


class _Layer(nn.Module):
    def __init__(self, stage: Stage, names: tuple[str, ...], number: int, stages: int) -> None:
        super().__init__()
        self.stage, self.names = stage, names
        self.is_first, self.is_last = number == 0, number == stages - 1

    def forward(self, given: Any) -> Any:
        """The next stage's tuple, or what the loss is made of."""
        state = given if isinstance(given, tuple) else (given,)
        split = len(state) - len(self.names)
        state, conditions = state[:split], state[split:]
        if self.is_first:
            conditions = tuple(value.detach().requires_grad_() for value in conditions)
        result = self.stage(*state, **dict(zip(self.names, conditions, strict=True)))
        if self.is_last:
            return result
        result = (*(result if isinstance(result, tuple) else (result,)), *conditions)
        return result if len(result) > 1 else result[0]
