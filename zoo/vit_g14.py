"""ViT-g/14 (Zhai et al., 2022: 40 layers, 1408 wide, 6144 within the MLP, 16 heads) as an image classifier.

Which of timm's: `vit_giant_patch14_clip_224`, the one of this shape with public weights (OpenCLIP, LAION-2B). Beside
the plain `vit_giant_patch14_224`, for which nobody has published any, it has a LayerNorm in front of the blocks and no
bias in the patch embedding: 1,408 parameters more of a thousand million, and the same costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pfeife_accelerate.zoo.images import in_rgb, square
from pfeife_accelerate.zoo.libraries import library
from pfeife_accelerate.zoo.model import BatchSize, ZooBatch, ZooModel

__all__ = ["VIT_G14", "VIT_G14_TINY"]

_CHANNELS: Final = 3


class _Timm:
    """Builds with `timm.create_model`."""

    def random(self, config: Mapping[str, Any]) -> nn.Module:
        module: nn.Module = library("timm").create_model(config["architecture"], **config["model_args"])
        return module

    def pretrained(self, source: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> nn.Module:
        """From the hub, whose classifier is used if it has as many classes; or a folder's `model.safetensors`."""
        arguments = {**config["model_args"], **overrides}
        if Path(source).is_dir():
            module = self.random({**config, "model_args": arguments})
            library("timm.models").load_checkpoint(module, str(Path(source) / "model.safetensors"))
            return module
        found: nn.Module = library("timm").create_model(f"hf-hub:{source}", pretrained=True, **arguments)
        return found


def _batch(config: Mapping[str, Any], size: BatchSize, generator: torch.Generator) -> ZooBatch:
    assert size.resolution is not None
    images = torch.randn(size.rows, _CHANNELS, size.resolution, size.resolution, generator=generator)
    labels = torch.randint(config["model_args"]["num_classes"], (size.rows,), generator=generator)
    return ZooBatch(inputs={"x": images.to(size.dtype)}, targets={"labels": labels})


def _loss(logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(logits.float(), targets["labels"])


def _transform() -> Callable[[Any], Tensor]:
    """224x224 pixels, cropped and normalised as the public weights were trained."""
    timm = library("timm")
    known = timm.get_pretrained_cfg(VIT_G14.config["architecture"]).to_dict()
    return in_rgb([timm.data.create_transform(**timm.data.resolve_data_config(known), is_training=False)])


def _digits_transform() -> Callable[[Any], Tensor]:
    """28x28 pixels between -1 and 1; digits of 8x8 grow."""
    assert VIT_G14_TINY.size.resolution is not None
    return square(VIT_G14_TINY.size.resolution)


VIT_G14: Final = ZooModel(
    name="vit-g14",
    title="ViT-g/14 with a classifier for 1,000 classes, images of 224x224",
    library="timm",
    num_parameters=1_012_612_840,
    builder=_Timm(),
    batch_maker=_batch,
    loss=_loss,
    size=BatchSize(rows=96, resolution=224),
    licence="MIT (LAION's CLIP-ViT-g-14-laion2B-s12B-b42K, converted by timm under Apache-2.0)",
    weights="timm/vit_giant_patch14_clip_224.laion2b",
    transform=_transform,
)

VIT_G14_TINY: Final = ZooModel(
    name="vit-g14-tiny",
    title="ViT-g/14 an eighth as wide, 8 layers, for digits of 28x28",
    library="timm",
    num_parameters=3_204_250,
    builder=_Timm(),
    batch_maker=_batch,
    loss=_loss,
    size=BatchSize(rows=64, resolution=28),
    licence="no weights",
    transform=_digits_transform,
    is_tiny=True,
)
