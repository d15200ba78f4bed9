"""What a capture leaves behind when it fails, taken back.

A capture runs the model's Python on fakes, up to the line that cannot go on. Models: attributes of modules, the lists,
dictionaries and sets directly in them, and the generators of torch, numpy and random. Ignores: everything else that
Python can change (files, globals, objects further down).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

_TENSORS = ("_parameters", "_buffers")  # a capture replaces what is in these, and puts it back itself


class Snapshot:
    """The state of a module's Python side, to go back to."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._attributes = [(vars(m), dict(vars(m))) for m in module.modules()]
        self._containers = [
            (value, value.copy())
            for _, before in self._attributes
            for name, value in before.items()
            if type(value) in (list, dict, set) and name not in _TENSORS
        ]
        self._device = device
        self._generators: tuple[Any, ...] = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Go back."""
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for container, before in self._containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        of_torch, of_numpy, of_random = self._generators
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_random)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)
