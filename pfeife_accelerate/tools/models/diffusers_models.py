"""Models of diffusers: by class or by a configuration, each with the batch that its training script makes.

Models: the denoising networks and the autoencoder in `_BATCHES`. Ignores: the text encoders beside them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.tools.models.case import (
    ROWS,
    ModelCase,
    ModelOptions,
    built,
    library,
    unknown_override,
    unused_option,
)

__all__ = ["diffusers_names", "from_diffusers", "is_diffusers_name"]

_TEXT_TOKENS = 77  # what CLIP's text encoder makes of a prompt
_SAMPLE = 64  # height and width where the configuration does not say


def diffusers_names() -> list[str]:
    """The classes that can be planned for."""
    return list(_BATCHES)


def is_diffusers_name(name: str) -> bool:
    """Whether diffusers has such a class."""
    return name in dir(library("diffusers")) and name.endswith(("Model", "KL", "2D"))


def from_diffusers(
    name: str, options: ModelOptions, *, data: Mapping[str, Any] | None = None, title: str | None = None
) -> ModelCase:
    """The case for a class of diffusers, with the values of a configuration file where there is one.

    Raises: PfeifeError PF131 to PF134 and PF139.
    """
    diffusers = library("diffusers")
    title = title or name
    if name not in _BATCHES:
        near = did_you_mean(name, _BATCHES)
        is_known = is_diffusers_name(name)
        raise PfeifeError(
            id="PF134" if is_known else "PF131",
            what=f"no example batch is known for {name}" if is_known else f"diffusers has no model class {name!r}",
            hints=((f"did you mean {near!r}?",) if near and not is_known else ()) + (f"known: {', '.join(_BATCHES)}",),
        )
    model_class = getattr(diffusers, name)
    known = [key for key in inspect.signature(model_class.__init__).parameters if key != "self"]
    changed = dict(options.overrides or {})
    for key in changed:
        if key not in known:
            raise unknown_override(title, key, known)
    module = built(title, options, lambda: model_class.from_config({**(data or {}), **changed}))
    return ModelCase(name=title, module=module, batch=_BATCHES[name](title, module.config, options))


def _float(options: ModelOptions, *size: int) -> torch.Tensor:
    return torch.zeros(ROWS, *size, dtype=options.dtype)


def _rows() -> torch.Tensor:
    return torch.zeros(ROWS, dtype=torch.long)


def _latents(config: Any, options: ModelOptions) -> torch.Tensor:
    size = options.resolution or config.sample_size or _SAMPLE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return _float(options, config.in_channels, height, width)


def _conditional_unet(title: str, config: Any, options: ModelOptions) -> dict[str, Any]:
    unused_option(title, options, uses=("seq", "resolution"))
    width = config.encoder_hid_dim or config.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    batch = {
        "sample": _latents(config, options),
        "timestep": _rows(),
        "encoder_hidden_states": _float(options, options.seq or _TEXT_TOKENS, width),
    }
    match config.addition_embed_type:
        case None:
            pass
        case "text_time":  # SDXL: a pooled text embedding, and six numbers of sizes and crops
            pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            batch["added_cond_kwargs"] = {"text_embeds": _float(options, pooled), "time_ids": _float(options, 6)}
        case other:
            raise PfeifeError(
                id="PF134",
                what=f"no example batch is known for {title} with addition_embed_type={other!r}",
                hints=("addition_embed_type=None, or 'text_time'",),
            )
    return batch | _classes(config)


def _classes(config: Any) -> dict[str, Any]:
    return {"class_labels": _rows()} if config.num_class_embeds or config.class_embed_type == "timestep" else {}


def _unet(title: str, config: Any, options: ModelOptions) -> dict[str, Any]:
    unused_option(title, options, uses=("resolution",))
    return {"sample": _latents(config, options), "timestep": _rows(), **_classes(config)}


def _dit(title: str, config: Any, options: ModelOptions) -> dict[str, Any]:
    unused_option(title, options, uses=("resolution",))
    return {"hidden_states": _latents(config, options), "timestep": _rows(), "class_labels": _rows()}


def _sd3(title: str, config: Any, options: ModelOptions) -> dict[str, Any]:
    unused_option(title, options, uses=("seq", "resolution"))
    return {
        "hidden_states": _latents(config, options),
        "encoder_hidden_states": _float(options, options.seq or 2 * _TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": _float(options, config.pooled_projection_dim),
        "timestep": _rows(),
    }


def _autoencoder(title: str, config: Any, options: ModelOptions) -> dict[str, Any]:
    unused_option(title, options, uses=("resolution",))
    return {"sample": _latents(config, options)}


#: What a call of each class is given.
_BATCHES: dict[str, Callable[[str, Any, ModelOptions], dict[str, Any]]] = {
    "UNet2DConditionModel": _conditional_unet,
    "UNet2DModel": _unet,
    "DiTTransformer2DModel": _dit,
    "SD3Transformer2DModel": _sd3,
    "AutoencoderKL": _autoencoder,
}
