"""Small models of the kinds that people train, built offline, each with a maker of batches and its loss.

Models: the structure of the real ones. Ignores: their size.

A batch is a dict of keyword arguments, but for the entry `target`, which only the loss reads. It is drawn from a
generator of its own, so that batches are the same in every process, whatever the model draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, Any]
_VOCABULARY = 96
_TARGET = "target"


@dataclass(frozen=True)
class Kit:
    """A model with what is needed to train it: `batch(generator, rows, length)` and `loss(outputs, target)`."""

    model: nn.Module
    batch: Callable[[torch.Generator, int, int], Batch]
    loss: Callable[[Any, Any], torch.Tensor]

    def run(self, model: nn.Module, batch: Batch) -> tuple[Any, torch.Tensor]:
        """Outputs and loss of the prepared `model`."""
        outputs = model(**{key: value for key, value in batch.items() if key != _TARGET})
        return outputs, self.loss(outputs, batch.get(_TARGET))


def build(name: str, dtype: torch.dtype) -> Kit:
    """The model of that name in that dtype, in training mode, always with the same parameters."""
    torch.manual_seed(0)
    kit = KITS[name]()
    kit.model.train().to(dtype)
    for module in kit.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # in training mode it sees micro-batches: the one documented exception

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        return {key: _cast(value, dtype) for key, value in kit.batch(generator, rows, length).items()}

    return Kit(kit.model, batch, kit.loss)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def inside(outputs: Any, target: Any) -> torch.Tensor:
    """The loss that the model computes itself."""
    return outputs.loss


def llama(*, tied: bool = False) -> Kit:
    """A decoder with rotary tables and a mask that cross all stages, optionally with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.loss_function = causal_loss
    return Kit(model, tokens, inside)


def causal_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """What transformers computes, which however computes it in float32 whatever the model's dtype."""
    if logits.dtype != torch.float64:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.view(-1, vocab_size), shifted, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def tokens(generator: torch.Generator, rows: int, length: int) -> Batch:
    """Token ids, padded at the end row by row, with labels of -100 spread unevenly."""
    ids = torch.randint(1, _VOCABULARY, (rows, length), generator=generator)
    lengths = torch.randint(max(1, length // 2), length + 1, (rows,), generator=generator)
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    dropped = torch.rand(rows, length, generator=generator) < torch.linspace(0.0, 0.8, rows)[:, None]
    labels = ids.masked_fill(dropped | (mask == 0), -100)
    labels[:, :2] = ids[:, :2]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def vit() -> Kit:
    """A vision transformer that returns a plain tensor."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, num_classes=10, depth=4, embed_dim=32, num_heads=2
    )
    return Kit(model, _images("x", 16), _smoothed)


def resnet() -> Kit:
    """A convolutional network with BatchNorm."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return Kit(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), _images("x", 16), _smoothed)


def _images(name: str, size: int) -> Callable[[torch.Generator, int, int], Batch]:
    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        return {
            name: torch.randn(rows, 3, size, size, generator=generator),
            _TARGET: torch.randint(0, 10, (rows,), generator=generator),
        }

    return batch


def _smoothed(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target, label_smoothing=0.1)


def unet() -> Kit:
    """A U-Net shaped as SDXL's: skips over several stages, nested inputs."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=4,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        transformer_layers_per_block=1,
        use_linear_projection=True,
    )

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(rows, *shape, generator=generator)

        return {
            "sample": noise(4, 8, 8),
            "timestep": torch.randint(0, 1000, (rows,), generator=generator),
            "encoder_hidden_states": noise(7, 16),
            "added_cond_kwargs": {"text_embeds": noise(32), "time_ids": noise(6)},
            _TARGET: noise(4, 8, 8),
        }

    return Kit(model, batch, lambda outputs, target: F.mse_loss(outputs.sample, target))


def bert() -> Kit:
    """An encoder with a classification head."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        made = tokens(generator, rows, length)
        return {**made, "labels": torch.randint(0, 3, (rows,), generator=generator)}

    return Kit(BertForSequenceClassification(config), batch, inside)


def t5() -> Kit:
    """An encoder and a decoder that share their embeddings."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        made = tokens(generator, rows, length)
        return {**made, "labels": tokens(generator, rows, max(3, length - 3))["labels"]}

    return Kit(T5ForConditionalGeneration(config), batch, inside)


class Encoder(nn.Module):
    """A plain stack of linear layers that returns embeddings: for losses of the script's own."""

    def __init__(self, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings of the rows."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class LossOnly(Encoder):
    """Returns nothing but its loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return F.mse_loss(super().forward(x), y)


def loss_only() -> Kit:
    """A model that returns nothing but its loss."""

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        return {"x": torch.randn(rows, 16, generator=generator), "y": torch.randn(rows, 16, generator=generator)}

    return Kit(LossOnly(), batch, lambda outputs, target: outputs)


def encoder() -> Kit:
    """A plain stack of linear layers."""

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        return {"x": torch.randn(rows, 16, generator=generator), _TARGET: torch.randn(rows, 16, generator=generator)}

    return Kit(Encoder(), batch, F.mse_loss)


def clip() -> Kit:
    """Two towers whose contrastive loss, over the whole batch, is computed inside."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**small, "vocab_size": _VOCABULARY, "max_position_embeddings": 32, "eos_token_id": _VOCABULARY - 1}
    vision = {**small, "image_size": 16, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        made = tokens(generator, rows, length)
        pixels = torch.randn(rows, 3, 16, 16, generator=generator)
        return {
            "input_ids": made["input_ids"],
            "attention_mask": made["attention_mask"],
            "pixel_values": pixels,
            "return_loss": True,
        }

    return Kit(CLIPModel(config), batch, inside)


def whisper() -> Kit:
    """Speech to text: convolutions over spectra, an encoder and a decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=_VOCABULARY,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=32,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def batch(generator: torch.Generator, rows: int, length: int) -> Batch:
        spectra = torch.randn(rows, 8, 24, generator=generator)
        return {"input_features": spectra, "labels": tokens(generator, rows, length)["labels"]}

    return Kit(WhisperForConditionalGeneration(config), batch, inside)


KITS: dict[str, Callable[[], Kit]] = {
    "llama": llama,
    "llama_tied": lambda: llama(tied=True),
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
    "bert": bert,
    "t5": t5,
    "clip": clip,
    "whisper": whisper,
    "encoder": encoder,
    "loss_only": loss_only,
}
