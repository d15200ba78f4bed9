"""What stands beside the U-Net of SDXL and is not trained: VAE, two text encoders with tokenizers, noise schedule.

They are those of a pretrained SDXL, or small ones with random weights, drawn from the seed: enough to train a small
U-Net on without a download. Random ones make no pictures: what is decoded by them shows that the code runs, no more.
"""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, EulerDiscreteScheduler
from sdxl_data import tokens
from torch import nn
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
)

TEXT_TOKENS = 77


class FrozenParts(nn.Module):
    """VAE and text encoders, and what SDXL computes with them."""

    def __init__(self, vae, text_encoders, tokenizers, noise_scheduler):
        super().__init__()
        self.vae, self.text_encoders = vae, nn.ModuleList(text_encoders)
        self.tokenizers, self.noise_scheduler = tokenizers, noise_scheduler
        self.requires_grad_(False).eval()

    def place(self, device, dtype):
        """The text encoders in the precision of training; the VAE stays in float32, since SDXL's overflows in half."""
        self.vae.to(device)
        self.text_encoders.to(device, dtype)
        return self

    @torch.no_grad()
    def encode_pictures(self, pixels):
        """Mean and deviation of each picture's latents: (rows, 2 * channels, height, width)."""
        latents = self.vae.encode(pixels.to(self.vae.device)).latent_dist
        return torch.cat([latents.mean, latents.std], dim=1)

    def draw_latents(self, moments):
        """Latents of the scale that the noise schedule is made for."""
        mean, deviation = moments.chunk(2, dim=1)
        return (mean + deviation * torch.randn_like(mean)) * self.vae.config.scaling_factor

    @torch.no_grad()
    def encode_tokens(self, *input_ids):
        """Embeddings of all tokens by both encoders side by side, and the second encoder's embedding of the text."""
        hidden = []
        for encoder, ids in zip(self.text_encoders, input_ids, strict=True):
            output = encoder(ids.to(encoder.device), output_hidden_states=True)
            hidden.append(output.hidden_states[-2])
        return torch.cat(hidden, dim=-1), output.text_embeds

    def encode_texts(self, texts):
        """The same from strings."""
        return self.encode_tokens(*(tokens(tokenizer, texts) for tokenizer in self.tokenizers))

    @torch.no_grad()
    def decode(self, latents):
        """Pictures as bytes: (rows, height, width, 3)."""
        pixels = self.vae.decode(latents.float() / self.vae.config.scaling_factor, return_dict=False)[0]
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()

    def sampler(self):
        """A scheduler that makes pictures in few steps."""
        return EulerDiscreteScheduler.from_config(self.noise_scheduler.config)


def pretrained_parts(path, *, revision=None, variant=None, prediction_type=None):
    """From a folder or hub repository with the layout of stable-diffusion-xl-base-1.0."""
    load = dict(revision=revision)
    weights = dict(variant=variant, **load)
    scheduler = dict(load, **({"prediction_type": prediction_type} if prediction_type else {}))
    return FrozenParts(
        vae=AutoencoderKL.from_pretrained(path, subfolder="vae", **weights),
        text_encoders=[
            CLIPTextModel.from_pretrained(path, subfolder="text_encoder", **weights),
            CLIPTextModelWithProjection.from_pretrained(path, subfolder="text_encoder_2", **weights),
        ],
        tokenizers=[
            AutoTokenizer.from_pretrained(path, subfolder=name, use_fast=False, **load)
            for name in ("tokenizer", "tokenizer_2")
        ],
        noise_scheduler=DDPMScheduler.from_pretrained(path, subfolder="scheduler", **scheduler),
    )


def small_parts(unet_config, *, pictures, prediction_type=None):
    """Random models of the widths that the U-Net reads. `pictures`: some of the data, to set the latents' scale by."""
    # SDXL's encoders share the width of the text embedding as 768 to 1280.
    width = unet_config["cross_attention_dim"]
    first = width * 3 // 8
    pooled = unet_config["projection_class_embeddings_input_dim"] - 6 * unet_config["addition_time_embed_dim"]
    tokenizer = ByT5Tokenizer(model_max_length=TEXT_TOKENS)  # a token is a byte: there is no vocabulary to download
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 16, 16),
        latent_channels=unet_config["in_channels"],
        norm_num_groups=8,
    )
    # A trained encoder is sure of its latents; one with random weights would add as much noise as it tells.
    nn.init.zeros_(vae.quant_conv.weight[vae.config.latent_channels :])
    nn.init.constant_(vae.quant_conv.bias[vae.config.latent_channels :], -10.0)
    parts = FrozenParts(
        vae=vae,
        text_encoders=[
            CLIPTextModel(_text_config(first, tokenizer, pooled)),
            CLIPTextModelWithProjection(_text_config(width - first, tokenizer, pooled)),
        ],
        tokenizers=[tokenizer, tokenizer],
        noise_scheduler=DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
            prediction_type=prediction_type or "epsilon",
        ),
    )
    mean, _ = parts.encode_pictures(pictures).chunk(2, dim=1)
    vae.register_to_config(scaling_factor=1 / mean.std().item())
    return parts


def _text_config(width, tokenizer, projection):
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=TEXT_TOKENS,
        projection_dim=projection,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
