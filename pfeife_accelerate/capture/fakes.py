"""Parameters and buffers as fake tensors: same names, shapes and device, no memory.

Capturing a model must not need the model's memory on any rank, so for the duration of a capture every parameter and
buffer is replaced by a fake twin that claims the target device. Dynamo's guards then refer to the twins; putting them
back in for a later call costs one dictionary store each and hits Dynamo's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pfeife_accelerate.capture.eager_ops import ValuelessMode
from pfeife_accelerate.compat import FakeTensor, FakeTensorMode, state_holders


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """One place in a module that holds a tensor: `holder[key]` is `real` or its `fake` twin."""

    holder: dict[str, torch.Tensor | None]
    key: str
    real: torch.Tensor
    fake: torch.Tensor


def fake_twin(real: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A fake tensor of that mode like `real`, a parameter if it is one, that claims to be on `device`."""
    with torch.no_grad():
        meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        fake = FakeTensor(mode, meta, device)
    is_parameter = isinstance(real, nn.Parameter)
    return nn.Parameter(fake, requires_grad=bool(real.requires_grad)) if is_parameter else fake


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)


class FakeState:
    """The fake twins of a model's parameters and buffers."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.mode = ValuelessMode()
        self.device = device
        self.name_of: dict[int, str] = {}
        """Canonical (first) name of the parameter or buffer behind each fake twin, by `id`."""
        self._slots: list[_Slot] = []
        self._twins: dict[int, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            for holder in state_holders(module):
                for key, real in holder.items():
                    if real is not None:
                        self._add(holder, key, real, f"{prefix}.{key}" if prefix else key)

    def _add(self, holder: dict[str, torch.Tensor | None], key: str, real: torch.Tensor, name: str) -> None:
        fake = self._twins.get(id(real))
        if fake is None:
            fake = self._twins[id(real)] = self._twin(real)
            self.name_of[id(fake)] = name
        self._slots.append(_Slot(holder=holder, key=key, real=real, fake=fake))

    def _twin(self, real: torch.Tensor) -> torch.Tensor:
        return fake_twin(real, self.mode, self.device)

    def matches(self) -> bool:
        """Whether the model still holds the tensors that the twins were made from (else the twins must be remade)."""
        return all(
            slot.fake.requires_grad == slot.real.requires_grad and slot.holder.get(slot.key) is slot.real
            for slot in self._slots
        )

    def real_states(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers by canonical name."""
        return {self.name_of[id(slot.fake)]: slot.real for slot in self._slots}

    def fake_states(self) -> dict[str, torch.Tensor]:
        """The twins by canonical name."""
        return {self.name_of[id(slot.fake)]: slot.fake for slot in self._slots}

    def assigned(self) -> list[tuple[str, torch.Tensor, Any]]:
        """What the model has put in the place of its tensors since the twins were put in: name, twin, value."""
        replaced = [slot for slot in self._slots if slot.holder.get(slot.key) is not slot.fake]
        return [(self.name_of[id(slot.fake)], slot.fake, slot.holder.get(slot.key)) for slot in replaced]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the twins into the model for the duration of a call."""
        for slot in self._slots:
            slot.holder[slot.key] = slot.fake
        try:
            yield
        finally:
            for slot in self._slots:
                slot.holder[slot.key] = slot.real
