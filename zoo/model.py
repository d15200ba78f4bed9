"""A member of the zoo: how it is built, what it is trained on, whose weights there are, what the paper says of it.

Models: modules of timm, transformers and diffusers from a configuration that is a data file
(`configs/<name>/config.json`, as those libraries read it), and batches of random numbers in the shapes of real ones.
Ignores: data sets and loops over them; the training scripts have those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.zoo.libraries import is_installed, library
from pfeife_accelerate.zoo.paper import FIGURES, GAINS, PUBLISHED_SETTINGS, PaperFigure, PaperGain, PublishedSettings

__all__ = ["BatchMaker", "BatchSize", "Builder", "Loss", "ZooBatch", "ZooModel"]

_PRETRAINED: Final = "pretrained"


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """How large a batch is; `seq` and `resolution` are None where the model has no such size."""

    rows: int
    seq: int | None = None  #: tokens of a row
    resolution: int | None = None  #: height and width of an image, or of the latent image of a diffusion model
    dtype: torch.dtype = torch.float32  #: of what is not whole numbers


@dataclass(frozen=True, kw_only=True)
class ZooBatch:
    """One batch: what the model is called with, and what the loss needs beside its outputs."""

    inputs: Mapping[str, Any]  #: keyword arguments; tensors have their rows in dimension 0
    targets: Mapping[str, Tensor]

    def to(self, device: torch.device | str) -> ZooBatch:
        """The same batch elsewhere."""
        return ZooBatch(inputs=_to(self.inputs, device), targets=_to(self.targets, device))


class Builder(Protocol):
    """Builds a module: from a configuration, or from weights in a folder or on the hub."""

    def random(self, config: Mapping[str, Any]) -> nn.Module:
        """With fresh weights, on the default device."""

    def pretrained(self, source: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> nn.Module:
        """With the weights at `source`."""


#: Makes a batch for a configuration. Draws from the generator alone.
BatchMaker = Callable[[Mapping[str, Any], BatchSize, torch.Generator], ZooBatch]
#: The loss of the model's outputs.
Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A model by name. Only `build`, `tokenizer` and `transform` import the model's library."""

    name: str
    title: str  #: what it is, in a line
    library: str  #: "timm", "transformers" or "diffusers"
    num_parameters: int
    builder: Builder
    batch_maker: BatchMaker
    loss: Loss
    size: BatchSize  #: of a batch where nobody says otherwise
    licence: str  #: of the weights
    weights: str | None = None  #: where they are on the hub
    tokenizer: Callable[[str | None], Any] | None = None  #: from a folder or the hub, or the usual one
    transform: Callable[[], Callable[[Any], Tensor]] | None = None  #: from a PIL image to a row of the batch
    is_tiny: bool = False

    @property
    def folder(self) -> Path:
        """Where `config.json` is, for `AutoConfig.from_pretrained` and its like."""
        return Path(str(files("pfeife_accelerate.zoo") / "configs" / self.name))

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, as its library writes it."""
        data: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return data

    @property
    def figures(self) -> tuple[PaperFigure, ...]:
        """The paper's, of this model."""
        return tuple(figure for figure in FIGURES if figure.model == self.name)

    @property
    def gains(self) -> tuple[PaperGain, ...]:
        """What parts of the paper's method gain on this model."""
        return tuple(gain for gain in GAINS if gain.model == self.name)

    @property
    def published_settings(self) -> tuple[PublishedSettings, ...]:
        """What the paper's authors' scripts for this model set."""
        return tuple(settings for settings in PUBLISHED_SETTINGS if settings.model == self.name)

    @property
    def is_installed(self) -> bool:
        """Whether its library is."""
        return is_installed(self.library)

    def build(
        self,
        source: str = "random",
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        overrides: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """The module in training mode.

        `source` is `meta` (no memory), `random` (weights that depend on `seed` alone), `pretrained` (the hub's
        weights), or a local folder or hub name with weights of this architecture. `overrides` are entries of the
        configuration.

        Raises: PfeifeError PF135 without the library, PF155 where weights cannot be had.
        """
        library(self.library)
        changed = dict(overrides or {})
        if source in ("meta", "random"):
            where = torch.device("meta" if source == "meta" else device)
            cuda = [where] if where.type == "cuda" else []
            with torch.random.fork_rng(cuda), where:
                torch.manual_seed(seed)
                module = self.builder.random(self._changed(changed))
        else:
            module = self._with_weights(source, changed).to(device)
        # Unasked, diffusers would remark on every conversion.
        return (module if dtype == torch.float32 else module.to(dtype)).train()

    def batch(
        self,
        rows: int | None = None,
        *,
        seed: int = 0,
        seq: int | None = None,
        resolution: int | None = None,
        dtype: torch.dtype = torch.float32,
        overrides: Mapping[str, Any] | None = None,
    ) -> ZooBatch:
        """A batch in the shapes of real ones; the same numbers for the same seed."""
        size = replace(
            self.size,
            rows=rows or self.size.rows,
            seq=seq or self.size.seq,
            resolution=resolution or self.size.resolution,
            dtype=dtype,
        )
        return self.batch_maker(self._changed(overrides or {}), size, torch.Generator().manual_seed(seed))

    def _changed(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        config = self.config
        if "model_args" in config:  # timm's
            return {**config, "model_args": {**config["model_args"], **overrides}}
        return {**config, **overrides}

    def _with_weights(self, source: str, overrides: Mapping[str, Any]) -> nn.Module:
        wanted = self.weights if source == _PRETRAINED else source
        if wanted is None:
            raise PfeifeError(
                id="PF155",
                what=f"{self.name} has no published weights",
                why="it is there to be trained from random ones",
                hints=('build("random")', "a folder with weights that you have saved"),
            )
        try:
            return self.builder.pretrained(wanted, self.config, overrides)
        except Exception as error:  # whatever the library raises for files and networks
            raise PfeifeError(
                id="PF155",
                what=f"the weights of {self.name} cannot be loaded from {wanted!r}",
                why=f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}",
                hints=("a local folder with the weights", 'build("random"), which needs none'),
            ) from error


def _to(values: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else _to(value, device) for key, value in values.items()}
