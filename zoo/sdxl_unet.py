"""The U-Net of Stable Diffusion XL base 1.0 (Podell et al., 2023): diffusers' `UNet2DConditionModel`.

Models: its training on predicting the noise of latent images, with text states, a pooled text embedding, and the six
numbers of an image's size and crop as conditions. Ignores: the VAE and the text encoders, which are not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pfeife_accelerate.zoo.causal_lm import byte_tokenizer
from pfeife_accelerate.zoo.images import square
from pfeife_accelerate.zoo.libraries import library
from pfeife_accelerate.zoo.model import BatchSize, ZooBatch, ZooModel

__all__ = ["SDXL_UNET", "SDXL_UNET_TINY"]

_HUB: Final = "stabilityai/stable-diffusion-xl-base-1.0"
_PIXELS: Final = 8  #: of an image's side, for each of its latent image's
_TIMESTEPS: Final = 1000
_NUM_TIME_IDS: Final = 6  #: height and width of the original, top and left of the crop, height and width wanted


class _UNet:
    """Builds `UNet2DConditionModel`."""

    def random(self, config: Mapping[str, Any]) -> nn.Module:
        plain = {key: value for key, value in config.items() if not key.startswith("_")}
        module: nn.Module = library("diffusers").UNet2DConditionModel.from_config(plain)
        return module

    def pretrained(self, source: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> nn.Module:
        """From a folder of the U-Net alone, or from a whole pipeline."""
        alone = (Path(source) / "config.json").is_file()
        where = {} if alone else {"subfolder": "unet"}
        model_class = library("diffusers").UNet2DConditionModel
        module: nn.Module = model_class.from_pretrained(source, **where, **overrides)
        return module


def _batch(config: Mapping[str, Any], size: BatchSize, generator: torch.Generator) -> ZooBatch:
    assert size.seq is not None and size.resolution is not None
    pixels = float(_PIXELS * size.resolution)
    pooled = config["projection_class_embeddings_input_dim"] - _NUM_TIME_IDS * config["addition_time_embed_dim"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(size.rows, *shape, generator=generator).to(size.dtype)

    time_ids = torch.tensor([pixels, pixels, 0.0, 0.0, pixels, pixels]).expand(size.rows, -1)
    inputs = {
        "sample": normal(config["in_channels"], size.resolution, size.resolution),
        "timestep": torch.randint(_TIMESTEPS, (size.rows,), generator=generator),
        "encoder_hidden_states": normal(size.seq, config["cross_attention_dim"]),
        "added_cond_kwargs": {"text_embeds": normal(pooled), "time_ids": time_ids.to(size.dtype).contiguous()},
    }
    return ZooBatch(inputs=inputs, targets={"noise": normal(config["out_channels"], size.resolution, size.resolution)})


def _loss(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    return functional.mse_loss(outputs.sample.float(), targets["noise"].float())


def _tokenizers(source: str | None = None) -> tuple[Any, Any]:
    """Those of the two text encoders, from the hub or a folder."""
    tokenizer = library("transformers").AutoTokenizer
    where = source or _HUB
    return (
        tokenizer.from_pretrained(where, subfolder="tokenizer"),
        tokenizer.from_pretrained(where, subfolder="tokenizer_2"),
    )


def _transform() -> Callable[[Any], Tensor]:
    """1024x1024 pixels between -1 and 1, for the VAE."""
    return square(_PIXELS * (SDXL_UNET.size.resolution or 0))


def _tiny_transform() -> Callable[[Any], Tensor]:
    """128x128 pixels between -1 and 1, for a VAE."""
    return square(_PIXELS * (SDXL_UNET_TINY.size.resolution or 0))


SDXL_UNET: Final = ZooModel(
    name="sdxl-unet",
    title="the U-Net of Stable Diffusion XL base 1.0, images of 1024x1024",
    library="diffusers",
    num_parameters=2_567_463_684,
    builder=_UNet(),
    batch_maker=_batch,
    loss=_loss,
    size=BatchSize(rows=8, seq=77, resolution=128),
    licence="CreativeML Open RAIL++-M",
    weights=_HUB,
    tokenizer=_tokenizers,
    transform=_transform,
)

SDXL_UNET_TINY: Final = ZooModel(
    name="sdxl-unet-tiny",
    title="the same U-Net a tenth as wide with fewer layers, images of 128x128",
    library="diffusers",
    num_parameters=5_423_844,
    builder=_UNet(),
    batch_maker=_batch,
    loss=_loss,
    size=BatchSize(rows=8, seq=32, resolution=16),
    licence="no weights",
    tokenizer=byte_tokenizer,
    transform=_tiny_transform,
    is_tiny=True,
)
