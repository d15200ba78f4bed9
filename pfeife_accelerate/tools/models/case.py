"""A model to plan for, built without memory, and how its training step calls it.

Models: the module on the meta device in training mode, one example batch of a few rows. Ignores: weights, data, and
the optimizer; the capture puts any number of rows for those of the example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.zoo.libraries import library

__all__ = ["ROWS", "ModelCase", "ModelOptions", "built", "library", "unknown_override", "unused_option"]

ROWS = 2  # of an example batch: the fewest that are not taken for a constant


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a person says of a model beside its name; None leaves it to the model's own configuration."""

    dtype: torch.dtype = torch.float32  #: of parameters and floating point inputs
    seq: int | None = None  #: tokens of a row
    resolution: int | None = None  #: height and width of an image, or of the latent image of a diffusion model
    overrides: Mapping[str, Any] | None = None  #: entries of the model's configuration


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model and the keyword arguments of one call; every tensor among them has `ROWS` rows in dimension 0."""

    name: str
    module: nn.Module
    batch: Mapping[str, Any]


def built(name: str, options: ModelOptions, build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, on the meta device, in the wanted element type and in training mode.

    Raises: PfeifeError PF133 where the library refuses.
    """
    try:
        with torch.device("meta"), _quiet("transformers", "diffusers", "timm"):
            return build().to(options.dtype).train()
    except Exception as error:  # whatever the model's own code raises
        raise PfeifeError(
            id="PF133",
            what=f"{name} cannot be built",
            why=f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}",
            hints=("check what was given with --set", "another configuration of the model"),
        ) from error


def unknown_override(name: str, key: str, known: Mapping[str, Any] | list[str]) -> PfeifeError:
    """The refusal of a `--set` that the model's configuration does not have."""
    near = did_you_mean(key, known)
    return PfeifeError(
        id="PF132",
        what=f"the configuration of {name} has no {key!r}",
        where=f"--set {key}=...",
        hints=(f"did you mean {near!r}?",) if near else (f"known: {', '.join(sorted(known))}",),
    )


def unused_option(name: str, options: ModelOptions, *, uses: tuple[str, ...]) -> None:
    """Refuse what was asked for in vain.

    Raises: PfeifeError PF139 for `--seq` or `--resolution` of a model that has no such size.
    """
    for option, value in (("seq", options.seq), ("resolution", options.resolution)):
        if value is not None and option not in uses:
            raise PfeifeError(
                id="PF139",
                what=f"--{option} means nothing to {name}",
                why=f"its example batch has no {'tokens' if option == 'seq' else 'image whose size is free'}",
                hints=(f"leave --{option} out",),
            )


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """No remarks of these libraries on how their models are built: nothing is trained here."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
