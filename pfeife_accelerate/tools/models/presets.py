"""Well-known models at full size, by short names.

Models: the configurations as their authors published them. Ignores: weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["PRESETS", "Preset"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A library's name for a model, and how its configuration differs from the default of that name."""

    library: str  #: "timm", "transformers" or "diffusers"
    name: str
    config: Mapping[str, Any]


PRESETS: Final[Mapping[str, Preset]] = {
    "llama2-7b": Preset(
        library="transformers",
        name="LlamaForCausalLM",
        config={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "gpt2-large": Preset(
        library="transformers", name="GPT2LMHeadModel", config={"n_layer": 36, "n_embd": 1280, "n_head": 20}
    ),
    "vit-g14": Preset(library="timm", name="vit_giant_patch14_224", config={}),
    "sdxl-unet": Preset(
        library="diffusers",
        name="UNet2DConditionModel",
        config={
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 2,
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
}
