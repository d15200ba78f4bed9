"""Llama2-7B (Touvron et al., 2023): transformers' `LlamaForCausalLM` with the published configuration.

The configuration is written out, so that no hub is needed; the weights and the tokenizer are behind Meta's licence.
"""

from __future__ import annotations

from typing import Any, Final

from pfeife_accelerate.zoo.causal_lm import CausalLM, byte_tokenizer, causal_lm_batch, causal_lm_loss
from pfeife_accelerate.zoo.libraries import library
from pfeife_accelerate.zoo.model import BatchSize, ZooModel

__all__ = ["LLAMA2_7B", "LLAMA2_7B_TINY"]

_HUB: Final = "meta-llama/Llama-2-7b-hf"


def _tokenizer(source: str | None = None) -> Any:
    """Llama 2's own, from the hub behind the same licence or from a folder."""
    return library("transformers").AutoTokenizer.from_pretrained(source or _HUB)


LLAMA2_7B: Final = ZooModel(
    name="llama2-7b",
    title="Llama2-7B, rows of 1,024 tokens",
    library="transformers",
    num_parameters=6_738_415_616,
    builder=CausalLM(),
    batch_maker=causal_lm_batch,
    loss=causal_lm_loss,
    size=BatchSize(rows=8, seq=1024),
    licence="Llama 2 Community License",
    weights=_HUB,
    tokenizer=_tokenizer,
)

LLAMA2_7B_TINY: Final = ZooModel(
    name="llama2-7b-tiny",
    title="Llama2 with 8 layers, 128 wide, on bytes",
    library="transformers",
    num_parameters=1_681_536,
    builder=CausalLM(),
    batch_maker=causal_lm_batch,
    loss=causal_lm_loss,
    size=BatchSize(rows=16, seq=128),
    licence="no weights",
    tokenizer=byte_tokenizer,
    is_tiny=True,
)
