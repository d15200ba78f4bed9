"""Pictures made by the U-Net that `train_sdxl.py` trains, as files.

Ignores: refiners, negative prompts.
"""

from pathlib import Path

import torch
from PIL import Image


class Prompts:
    """Texts to make pictures of, as embeddings: they outlive the text encoders."""

    def __init__(self, args, eval_rows, parts):
        rows = range(min(4, len(eval_rows)))
        self.texts = args.validation_prompts or [eval_rows[index]["text"] for index in rows]
        self.embeddings, self.pooled = parts.encode_texts(self.texts)
        self.empty = parts.encode_texts([""])


@torch.no_grad()
def make_pictures(args, model, accelerator, parts, prompts, step):
    """One picture of each prompt, always from the same noise; all processes compute, the main process writes."""
    model.eval()
    device, count = accelerator.device, len(prompts.texts)
    scheduler, side = parts.sampler(), args.resolution // 8
    scheduler.set_timesteps(args.num_inference_steps, device=device)
    generator = torch.Generator().manual_seed(args.seed)
    latents = torch.randn(count, parts.vae.config.latent_channels, side, side, generator=generator).to(device)
    latents = latents * scheduler.init_noise_sigma
    embeddings = torch.cat([prompts.empty[0].expand(count, -1, -1), prompts.embeddings])
    pooled = torch.cat([prompts.empty[1].expand(count, -1), prompts.pooled])
    sizes = [args.resolution, args.resolution, 0, 0, args.resolution, args.resolution]
    time_ids = torch.tensor(2 * count * [sizes], device=device).float()
    conditions = {"text_embeds": pooled, "time_ids": time_ids}
    for timestep in scheduler.timesteps:
        both = scheduler.scale_model_input(torch.cat([latents, latents]), timestep)
        both = model(both, timestep, embeddings, added_cond_kwargs=conditions, return_dict=False)[0]
        without, with_prompt = both.float().chunk(2)
        prediction = without + args.guidance_scale * (with_prompt - without)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    model.train()
    if accelerator.is_main_process:
        folder = Path(args.output_dir) / "pictures"
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(parts.decode(latents)):
            Image.fromarray(picture).save(folder / f"step_{step:06d}_{number}.png")
