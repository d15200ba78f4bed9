"""The models that the peers train: a module, one batch, and the loss, as a script would have them.

Models: fp32 models of the sizes at which two CPU cores take seconds for a step, and a tiny one whose stages cost
nothing; the same weights and data in every process, by the same seed. Ignores: how they are cut (`peers_units.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["BUILDERS", "TINY_LAYERS", "TINY_WIDTH", "ModelCase", "build"]

TINY_WIDTH, TINY_LAYERS = 8, 8
CLASSES, SIDE = 1000, 224
VOCABULARY, TOKENS = 8192, 256
LATENT, CONDITION = 32, 256


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model in training mode and one batch; every tensor has its rows in dimension 0."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]  #: that the model starts from
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    call: Callable[[nn.Module, tuple[Tensor, ...], Mapping[str, Tensor]], Tensor]
    conditions: Mapping[str, Tensor]  #: that many layers read
    has_batch_statistics: bool = False  #: its loss depends on how the batch is cut

    @property
    def rows(self) -> int:
        """Of the batch."""
        return int(self.target.shape[0])

    def part(self, number: int, parts: int) -> ModelCase:
        """The same model with an equal part of the batch."""
        return ModelCase(
            name=self.name,
            module=self.module,
            inputs=tuple(tensor.chunk(parts)[number] for tensor in self.inputs),
            target=self.target.chunk(parts)[number],
            loss=self.loss,
            call=self.call,
            conditions={key: tensor.chunk(parts)[number] for key, tensor in self.conditions.items()},
            has_batch_statistics=self.has_batch_statistics,
        )

    def forward_loss(self, module: nn.Module) -> Tensor:
        """The loss of the whole batch, by whatever stands for the model."""
        return self.loss(self.call(module, self.inputs, self.conditions), self.target)


def build(name: str, rows: int) -> ModelCase:
    """A model and its batch, the same at each call."""
    torch.manual_seed(0)
    case = BUILDERS[name](rows)
    case.module.train()
    return case


def _plain_call(module: nn.Module, inputs: tuple[Tensor, ...], conditions: Mapping[str, Tensor]) -> Tensor:
    return module(*inputs)


def _vit(rows: int) -> ModelCase:
    import timm

    return ModelCase(
        name="vit",
        module=timm.create_model("vit_small_patch16_224", num_classes=CLASSES, img_size=SIDE),
        inputs=(torch.randn(rows, 3, SIDE, SIDE),),
        target=torch.randint(0, CLASSES, (rows,)),
        loss=functional.cross_entropy,
        call=_plain_call,
        conditions={},
    )


def _resnet(rows: int) -> ModelCase:
    import timm

    return ModelCase(
        name="resnet",
        module=timm.create_model("resnet50", num_classes=CLASSES, zero_init_last=False),
        inputs=(torch.randn(rows, 3, SIDE, SIDE),),
        target=torch.randint(0, CLASSES, (rows,)),
        loss=functional.cross_entropy,
        call=_plain_call,
        conditions={},
        has_batch_statistics=True,
    )


def _llama(rows: int) -> ModelCase:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        intermediate_size=1376,
        vocab_size=VOCABULARY,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    module = LlamaForCausalLM(config)
    tokens = torch.randint(0, VOCABULARY, (rows, TOKENS))
    return ModelCase(
        name="llama",
        module=module,
        inputs=(tokens,),
        target=tokens.clone(),
        loss=_next_token_loss,
        call=lambda model, inputs, _: model(input_ids=inputs[0], use_cache=False).logits,
        conditions={},
    )


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def _unet(rows: int) -> ModelCase:
    from diffusers import UNet2DConditionModel

    module = UNet2DConditionModel(
        sample_size=LATENT,
        in_channels=4,
        out_channels=4,
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(64, 128, 256),
        transformer_layers_per_block=(1, 2, 4),
        cross_attention_dim=CONDITION,
        attention_head_dim=(2, 4, 8),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=64,
        projection_class_embeddings_input_dim=CONDITION + 6 * 64,
    )
    return ModelCase(
        name="unet",
        module=module,
        inputs=(
            torch.randn(rows, 4, LATENT, LATENT),
            torch.randint(0, 1000, (rows,)),
            torch.randn(rows, CONDITION),
            512 * torch.rand(rows, 6),
        ),
        target=torch.randn(rows, 4, LATENT, LATENT),
        loss=functional.mse_loss,
        call=_unet_call,
        conditions={"encoder_hidden_states": torch.randn(rows, 77, CONDITION)},
    )


def _unet_call(module: nn.Module, inputs: tuple[Tensor, ...], conditions: Mapping[str, Tensor]) -> Tensor:
    sample, timestep, text, sizes = inputs
    added = {"text_embeds": text, "time_ids": sizes}
    return module(sample, timestep, added_cond_kwargs=added, return_dict=False, **conditions)[0]


def _tiny(rows: int) -> ModelCase:
    return ModelCase(
        name="tiny",
        module=nn.Sequential(*(nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(TINY_LAYERS))),
        inputs=(torch.randn(rows, TINY_WIDTH),),
        target=torch.randn(rows, TINY_WIDTH),
        loss=functional.mse_loss,
        call=_plain_call,
        conditions={},
    )


BUILDERS: Mapping[str, Callable[[int], ModelCase]] = {
    "vit": _vit,
    "llama": _llama,
    "unet": _unet,
    "resnet": _resnet,
    "tiny": _tiny,
}
