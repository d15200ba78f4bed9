"""GPT2-large (Radford et al., 2019): transformers' `GPT2LMHeadModel` with the published configuration.

Its output layer shares the weights of its input embedding, which a pipeline has at both ends. The tiny one has no
dropout, so that its losses can be compared between any numbers of micro-batches.
"""

from __future__ import annotations

from typing import Any, Final

from pfeife_accelerate.zoo.causal_lm import CausalLM, byte_tokenizer, causal_lm_batch, causal_lm_loss
from pfeife_accelerate.zoo.libraries import library
from pfeife_accelerate.zoo.model import BatchSize, ZooModel

__all__ = ["GPT2_LARGE", "GPT2_LARGE_TINY"]

_HUB: Final = "openai-community/gpt2-large"


def _tokenizer(source: str | None = None) -> Any:
    """GPT2's own, from the hub or a folder."""
    return library("transformers").AutoTokenizer.from_pretrained(source or _HUB)


GPT2_LARGE: Final = ZooModel(
    name="gpt2-large",
    title="GPT2-large, rows of 1,024 tokens",
    library="transformers",
    num_parameters=774_030_080,
    builder=CausalLM(),
    batch_maker=causal_lm_batch,
    loss=causal_lm_loss,
    size=BatchSize(rows=16, seq=1024),
    licence="MIT (modified)",
    weights=_HUB,
    tokenizer=_tokenizer,
)

GPT2_LARGE_TINY: Final = ZooModel(
    name="gpt2-large-tiny",
    title="GPT2 with 8 layers, 128 wide, on bytes",
    library="transformers",
    num_parameters=1_701_120,
    builder=CausalLM(),
    batch_maker=causal_lm_batch,
    loss=causal_lm_loss,
    size=BatchSize(rows=16, seq=128),
    licence="no weights",
    tokenizer=byte_tokenizer,
    is_tiny=True,
)
