"""Causal language models of transformers: built from a configuration, trained on rows of tokens.

Models: full rows, every token a label. Ignores: padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pfeife_accelerate.zoo.libraries import library
from pfeife_accelerate.zoo.model import BatchSize, ZooBatch

__all__ = ["CausalLM", "byte_tokenizer", "causal_lm_batch", "causal_lm_loss"]


class CausalLM:
    """Builds with `AutoModelForCausalLM`."""

    def random(self, config: Mapping[str, Any]) -> nn.Module:
        """With fresh weights."""
        transformers = library("transformers")
        known = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(known)
        return module

    def pretrained(self, source: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> nn.Module:
        """With the weights at `source`, whose own configuration counts."""
        transformers = library("transformers")
        module: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(source, **overrides)
        return module


def causal_lm_batch(config: Mapping[str, Any], size: BatchSize, generator: torch.Generator) -> ZooBatch:
    """Tokens drawn from the whole vocabulary; the model itself shifts the labels."""
    assert size.seq is not None
    tokens = torch.randint(config["vocab_size"], (size.rows, size.seq), generator=generator)
    return ZooBatch(inputs={"input_ids": tokens, "labels": tokens.clone()}, targets={})


def causal_lm_loss(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    """What the model has computed itself."""
    loss: Tensor = outputs.loss
    return loss


def byte_tokenizer(source: str | None = None) -> Any:
    """Bytes, three special tokens and 125 spare ones; needs no file."""
    transformers = library("transformers")
    return transformers.AutoTokenizer.from_pretrained(source) if source else transformers.ByT5Tokenizer()
