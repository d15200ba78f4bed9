"""From PIL images of any size and mode to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pfeife_accelerate.zoo.libraries import library

__all__ = ["in_rgb", "square"]


def in_rgb(steps: Sequence[Any]) -> Callable[[Any], Tensor]:
    """These transforms, on three channels whatever the image has."""
    transforms = library("torchvision.transforms")
    transform: Callable[[Any], Tensor] = transforms.Compose([transforms.Lambda(_rgb), *steps])
    return transform


def square(side: int) -> Callable[[Any], Tensor]:
    """The middle of the image, its shorter side scaled to `side` pixels, with values between -1 and 1."""
    transforms = library("torchvision.transforms")
    resize = transforms.Resize(side, interpolation=transforms.InterpolationMode.BICUBIC)
    return in_rgb([resize, transforms.CenterCrop(side), transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])


def _rgb(image: Any) -> Any:  # a function, not a lambda: workers of a DataLoader may have to unpickle it
    return image.convert("RGB")
