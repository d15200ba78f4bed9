"""Models of timm: image classifiers, by timm's own names."""

from __future__ import annotations

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.models.case import ROWS, ModelCase, ModelOptions, built, library, unused_option

__all__ = ["from_timm", "is_timm_name", "timm_names"]


def timm_names() -> list[str]:
    """Every name that timm knows."""
    return list(library("timm").list_models())


def is_timm_name(name: str) -> bool:
    """Whether timm can build a model of that name."""
    return bool(library("timm").is_model(name))


def from_timm(name: str, options: ModelOptions, *, title: str | None = None) -> ModelCase:
    """The case for a timm model.

    Raises: PfeifeError PF133 and PF139.
    """
    timm = library("timm")
    unused_option(name, options, uses=("resolution",))
    arguments = dict(options.overrides or {})
    known = timm.get_pretrained_cfg(name)
    if known is None:
        raise PfeifeError(
            id="PF134",
            what=f"timm does not say which images {name} takes",
            hints=("another timm model",),
        )
    if options.resolution is not None and known.fixed_input_size:
        arguments["img_size"] = options.resolution
    module = built(name, options, lambda: timm.create_model(name, pretrained=False, **arguments))
    channels, height, width = known.input_size
    side = options.resolution or arguments.get("img_size") or (height, width)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    size = (ROWS, arguments.get("in_chans", channels), height, width)
    return ModelCase(name=title or name, module=module, batch={"x": torch.zeros(size, dtype=options.dtype)})
