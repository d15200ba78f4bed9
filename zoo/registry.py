"""The members of the zoo by their names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.zoo.gpt2_large import GPT2_LARGE, GPT2_LARGE_TINY
from pfeife_accelerate.zoo.llama2_7b import LLAMA2_7B, LLAMA2_7B_TINY
from pfeife_accelerate.zoo.model import ZooModel
from pfeife_accelerate.zoo.sdxl_unet import SDXL_UNET, SDXL_UNET_TINY
from pfeife_accelerate.zoo.vit_g14 import VIT_G14, VIT_G14_TINY

__all__ = ["MEMBERS", "member"]

#: In the paper's order, the tiny ones after them.
MEMBERS: Final[Mapping[str, ZooModel]] = MappingProxyType(
    {
        model.name: model
        for model in (
            VIT_G14,
            GPT2_LARGE,
            LLAMA2_7B,
            SDXL_UNET,
            VIT_G14_TINY,
            GPT2_LARGE_TINY,
            LLAMA2_7B_TINY,
            SDXL_UNET_TINY,
        )
    }
)


def member(name: str) -> ZooModel:
    """The member of that name.

    Raises: PfeifeError PF156 for a name that none has.
    """
    if name in MEMBERS:
        return MEMBERS[name]
    near = did_you_mean(name, MEMBERS)
    raise PfeifeError(
        id="PF156",
        what=f"the zoo has no model {name!r}",
        hints=(*((f"did you mean {near!r}?",) if near else ()), f"its members: {', '.join(MEMBERS)}"),
    )
