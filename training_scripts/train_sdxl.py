"""Train the U-Net of Stable Diffusion XL on pictures with captions, with HuggingFace Accelerate.

    accelerate launch training_scripts/train_sdxl.py
    accelerate launch training_scripts/train_sdxl.py --pretrained sdxl-base/ --train_dir photos/ --cache_latents
    accelerate launch training_scripts/train_sdxl.py --model sdxl-unet --dataset_name someone/pictures --resolution 1024

Without a data set it learns crops of scikit-learn's two sample photographs, and without `--pretrained` the VAE and the
text encoders are small random ones: nothing is downloaded. What was trained is saved as a U-Net of diffusers.
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import DistributedType
from accelerate.utils import set_seed
from common import (
    Progress,
    RunLog,
    add_training_arguments,
    batch_size_per_process,
    make_accelerator,
    make_optimizer,
    make_scheduler,
    model_config_folder,
    not_negative,
    number_of_steps,
    parse_arguments,
    positive,
    resume,
    save_checkpoint,
)
from diffusers import UNet2DConditionModel
from diffusers.training_utils import EMAModel, compute_snr
from sdxl_data import CachedPictures, CaptionedPictures, load_examples
from sdxl_parts import pretrained_parts, small_parts
from sdxl_pictures import Prompts, make_pictures
from splits import check_sizes
from torch.utils.data import DataLoader


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="sdxl-unet-tiny", help="a folder with config.json, or a name in zoo/configs")
    parser.add_argument("--pretrained", help="a folder or hub repository laid out as stable-diffusion-xl-base-1.0")
    parser.add_argument("--revision")
    parser.add_argument("--variant", help="such as fp16")
    add_data_arguments(parser.add_argument_group("data"))
    loss = parser.add_argument_group("noise and loss")
    loss.add_argument("--prediction_type", choices=["epsilon", "v_prediction"], help="default: the noise schedule's")
    loss.add_argument("--snr_gamma", type=not_negative(float), help="weigh time steps by min(SNR, gamma); 5.0 is usual")
    loss.add_argument("--noise_offset", type=float, default=0.0, help="noise added to a whole channel")
    loss.add_argument("--proportion_empty_prompts", type=float, default=0.0, help="captions replaced by an empty one")
    ema = parser.add_argument_group("moving average of the weights")
    ema.add_argument("--use_ema", action=argparse.BooleanOptionalAction, default=True, help="the average is saved")
    ema.add_argument("--ema_decay", type=float, default=0.9999)
    ema.add_argument("--foreach_ema", action="store_true", help="average all weights by a few calls")
    pictures = parser.add_argument_group("sample pictures")
    pictures.add_argument("--validation_steps", type=positive, help="make pictures every so many steps, and at the end")
    pictures.add_argument("--validation_prompts", nargs="+", help="default: captions that were held out")
    pictures.add_argument("--num_inference_steps", type=positive, default=20)
    pictures.add_argument("--guidance_scale", type=float, default=5.0)
    add_training_arguments(
        parser, output_dir="outputs/train_sdxl", train_batch_size=16, eval_batch_size=16, weight_decay=0.01,
        max_eval_samples=64, num_train_epochs=3, lr_warmup_steps=10,
    )  # fmt: skip
    return parse_arguments(parser)


def add_data_arguments(data):
    data.add_argument("--dataset_name", help="a data set of the hub with pictures and captions")
    data.add_argument("--dataset_config_name")
    data.add_argument("--train_dir", help="a local folder of pictures, with captions in metadata.csv or metadata.jsonl")
    data.add_argument("--image_column", default="image")
    data.add_argument("--caption_column", default="text")
    data.add_argument("--resolution", type=positive, help="pixels of a side; default: what the U-Net is made for")
    data.add_argument("--random_crop", action="store_true", help="instead of the middle")
    data.add_argument("--random_flip", action="store_true", help="half of the pictures are mirrored")
    data.add_argument(
        "--cache_latents", action="store_true", help="run VAE and text encoders once, on middle crops, before training"
    )


# -- models and data ---------------------------------------------------------------------------------------------------


def build_models(args):
    """The U-Net and what stands beside it, and the data in two parts."""
    if args.pretrained:
        unet = UNet2DConditionModel.from_pretrained(
            args.pretrained, subfolder="unet", revision=args.revision, variant=args.variant
        )
    else:
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(str(model_config_folder(args.model))))
    args.resolution = args.resolution or unet.config.sample_size * 8
    train_rows, eval_rows = load_examples(args, "train"), load_examples(args, "validation")
    check_sizes(train_rows, eval_rows)
    if args.pretrained:
        options = dict(revision=args.revision, variant=args.variant, prediction_type=args.prediction_type)
        parts = pretrained_parts(args.pretrained, **options)
    else:
        some = CaptionedPictures(train_rows, (), resolution=args.resolution)
        pictures = torch.stack([some[index]["pixel_values"] for index in range(min(32, len(some)))])
        parts = small_parts(unet.config, pictures=pictures, prediction_type=args.prediction_type)
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    return unet, parts, train_rows, eval_rows


def make_datasets(args, accelerator, parts, train_rows, eval_rows):
    changes = {} if args.cache_latents else dict(random_crop=args.random_crop, random_flip=args.random_flip)
    common = dict(resolution=args.resolution, seed=args.seed)
    train_set = CaptionedPictures(train_rows, parts.tokenizers, **common, **changes)
    eval_set = CaptionedPictures(eval_rows, parts.tokenizers, **common)
    if args.cache_latents:
        train_set, eval_set = (cached(dataset, args, accelerator, parts) for dataset in (train_set, eval_set))
        parts.text_encoders.to("cpu")
    return train_set, eval_set


def cached(dataset, args, accelerator, parts):
    """The data set as the frozen models see it; the processes share the work, and each gets all of it."""
    loader = accelerator.prepare_data_loader(
        DataLoader(dataset, batch_size=args.eval_batch_size, num_workers=args.num_workers)
    )
    columns = {}
    for batch in loader:
        for name, values in accelerator.gather_for_metrics(encoded(batch, parts)).items():
            columns.setdefault(name, []).append(values.cpu())
    return CachedPictures({name: torch.cat(values) for name, values in columns.items()})


def encoded(batch, parts):
    """What the U-Net is trained on: moments of the latents, embeddings of the captions, sizes."""
    if "moments" in batch:
        return batch
    embeddings, pooled = parts.encode_tokens(batch["input_ids_0"], batch["input_ids_1"])
    return {
        "index": batch["index"],
        "moments": parts.encode_pictures(batch["pixel_values"]),
        "embeddings": embeddings,
        "pooled": pooled,
        "time_ids": batch["time_ids"],
    }


# -- loss --------------------------------------------------------------------------------------------------------------


def predicted(model, latents, timesteps, batch, embeddings, pooled):
    conditions = {"text_embeds": pooled, "time_ids": batch["time_ids"]}
    return model(latents, timesteps, embeddings, added_cond_kwargs=conditions, return_dict=False)[0]


def target_of(scheduler, latents, noise, timesteps):
    match scheduler.config.prediction_type:
        case "epsilon":
            return noise
        case "v_prediction":
            return scheduler.get_velocity(latents, noise, timesteps)
        case other:
            raise SystemExit(f"the noise schedule's prediction_type {other!r} is not supported")


def training_loss(args, model, batch, parts, empty):
    batch, scheduler = encoded(batch, parts), parts.noise_scheduler
    latents = parts.draw_latents(batch["moments"])
    rows, device = len(latents), latents.device
    noise = torch.randn_like(latents)
    if args.noise_offset:
        noise += args.noise_offset * torch.randn(rows, latents.shape[1], 1, 1, device=device)
    timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (rows,), device=device)
    embeddings, pooled = batch["embeddings"], batch["pooled"]
    if args.proportion_empty_prompts:
        is_empty = torch.rand(rows, device=device) < args.proportion_empty_prompts
        embeddings = torch.where(is_empty[:, None, None], empty[0], embeddings)
        pooled = torch.where(is_empty[:, None], empty[1], pooled)

    noisy = scheduler.add_noise(latents, noise, timesteps)
    prediction = predicted(model, noisy, timesteps, batch, embeddings, pooled)
    target = target_of(scheduler, latents, noise, timesteps)
    if args.snr_gamma is None:
        return F.mse_loss(prediction.float(), target.float())
    # https://arxiv.org/abs/2303.09556, section 3.4
    snr = compute_snr(scheduler, timesteps)
    divisor = snr + 1 if scheduler.config.prediction_type == "v_prediction" else snr
    weights = snr.clamp(max=args.snr_gamma) / divisor
    losses = F.mse_loss(prediction.float(), target.float(), reduction="none")
    return (losses.mean(dim=list(range(1, losses.ndim))) * weights).mean()


@torch.no_grad()
def evaluate(model, dataloader, accelerator, parts):
    """Mean squared error on held-out pictures: each has its own noise and time step, the same at every evaluation."""
    model.eval()
    scheduler, errors = parts.noise_scheduler, []
    for batch in dataloader:
        batch = encoded(batch, parts)
        latents = batch["moments"].chunk(2, dim=1)[0] * parts.vae.config.scaling_factor
        # Steps of 617 spread the time steps of any few pictures over the whole schedule.
        timesteps = (311 + 617 * batch["index"]) % scheduler.config.num_train_timesteps
        seeds = batch["index"].tolist()
        noise = torch.stack([torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(s)) for s in seeds])
        noise = noise.to(latents)
        noisy = scheduler.add_noise(latents, noise, timesteps)
        prediction = predicted(model, noisy, timesteps, batch, batch["embeddings"], batch["pooled"])
        error = (prediction.float() - target_of(scheduler, latents, noise, timesteps).float()).square()
        errors += accelerator.gather_for_metrics(error.mean(dim=(1, 2, 3))).tolist()
    model.train()
    return {"loss": sum(errors) / len(errors), "num_items": len(errors)}


# -- moving average ----------------------------------------------------------------------------------------------------


def make_ema(args, accelerator, unet):
    """The moving average of the weights, as part of every checkpoint, or None."""
    if not args.use_ema:
        return None
    deepspeed = accelerator.state.deepspeed_plugin
    if accelerator.distributed_type == DistributedType.FSDP or (deepspeed and deepspeed.zero_stage == 3):
        raise SystemExit("the moving average needs whole weights on every process: --no-use_ema with FSDP and ZeRO-3")
    ema = EMAModel(
        unet.parameters(), decay=args.ema_decay, model_cls=UNet2DConditionModel, model_config=unet.config,
        foreach=args.foreach_ema,
    )  # fmt: skip
    ema.to(accelerator.device)

    def save(models, weights, output_dir):
        if accelerator.is_main_process:
            ema.save_pretrained(str(Path(output_dir) / "unet_ema"))

    def load(models, input_dir):
        saved = EMAModel.from_pretrained(str(Path(input_dir) / "unet_ema"), UNet2DConditionModel)
        ema.load_state_dict(saved.state_dict())
        ema.to(accelerator.device)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return ema


@contextlib.contextmanager
def averaged(ema, model):
    """The averaged weights are in the model."""
    if ema is None:
        yield
        return
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    try:
        yield
    finally:
        ema.restore(model.parameters())


def save_unet(args, accelerator, model, ema):
    """The averaged weights if there are any: a folder for `UNet2DConditionModel.from_pretrained`."""
    folder = str(Path(args.output_dir) / "unet")
    state = accelerator.get_state_dict(model) if ema is None else None
    if accelerator.is_main_process:
        unet = UNet2DConditionModel.from_config(accelerator.unwrap_model(model).config)
        if ema is None:
            unet.load_state_dict(state)
        else:
            ema.copy_to(unet.parameters())
        unet.save_pretrained(folder)
    accelerator.print(f"the trained U-Net is in {folder}")


# -- training ----------------------------------------------------------------------------------------------------------


class Training:
    """A run: what was prepared, and how far it is."""

    def __init__(self, args, accelerator, prepared, parts, prompts, ema):
        self.args, self.accelerator, self.parts, self.prompts, self.ema = args, accelerator, parts, prompts, ema
        self.model, self.optimizer, self.scheduler, self.train_dataloader, self.eval_dataloader = prepared
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.progress)
        resume(accelerator, args, self.progress)
        self.log = RunLog(accelerator, args, self.progress)

    def run(self, num_steps, steps_per_epoch):
        self.model.train()
        while self.progress.step < num_steps:
            epoch, num_done = self.progress.position(self.args, steps_per_epoch)
            self.train_dataloader.set_epoch(epoch)
            self.train_dataloader.dataset.epoch = epoch
            rest = self.train_dataloader
            for batch in self.accelerator.skip_first_batches(rest, num_done) if num_done else rest:
                self.step(batch)
                if self.accelerator.sync_gradients:
                    with self.log.paused():
                        self.after_step(is_last=self.progress.step == num_steps)
                    if self.progress.step == num_steps:
                        break
        self.log.summary()

    def step(self, batch):
        """A backward pass, and an optimizer step if it is time."""
        accelerator, args, grad_norm = self.accelerator, self.args, None
        with accelerator.accumulate(self.model):
            loss = training_loss(args, self.model, batch, self.parts, self.prompts.empty)
            rows = len(batch["index"])
            # Each process's loss counts by its rows.
            mean_loss = accelerator.gather(loss.detach().repeat(rows)).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients and args.max_grad_norm:
                grad_norm = accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
            lr = self.scheduler.get_last_lr()[0]
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.log.add(mean_loss, items=rows)
        if accelerator.sync_gradients:
            if self.ema is not None:
                self.ema.step(self.model.parameters())
            self.progress.step += 1
            self.log.step(self.progress.step, lr=lr, grad_norm=grad_norm)

    def after_step(self, *, is_last):
        """Evaluation, pictures and a checkpoint, each if it is time."""
        args, step = self.args, self.progress.step
        evaluates = is_last or (args.eval_steps and step % args.eval_steps == 0)
        draws = args.validation_steps and (is_last or step % args.validation_steps == 0)
        if evaluates or draws:
            with averaged(self.ema, self.model):
                if evaluates:
                    values = evaluate(self.model, self.eval_dataloader, self.accelerator, self.parts)
                    self.log.evaluation(step, **values)
                if draws:
                    make_pictures(args, self.model, self.accelerator, self.parts, self.prompts, step)
        if args.checkpointing_steps and step % args.checkpointing_steps == 0:
            save_checkpoint(self.accelerator, self.progress)


def main():
    args = parse_args()
    accelerator = make_accelerator(args)
    set_seed(args.seed)
    unet, parts, train_rows, eval_rows = build_models(args)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)
    parts.place(accelerator.device, dtype)
    prompts = Prompts(args, eval_rows, parts)
    train_set, eval_set = make_datasets(args, accelerator, parts, train_rows, eval_rows)
    num_parameters = sum(parameter.numel() for parameter in unet.parameters())
    accelerator.print(f"{num_parameters / 1e6:.1f} M parameters, {len(train_set)} pictures of {args.resolution} pixels")

    options = {"num_workers": args.num_workers, "pin_memory": torch.cuda.is_available()}
    train_dataloader = DataLoader(
        train_set,
        batch_size=batch_size_per_process(args, accelerator),
        shuffle=True,
        drop_last=True,
        # So that starting an epoch, also in its middle, draws nothing from the generator of noise.
        generator=torch.Generator().manual_seed(args.seed),
        **options,
    )
    eval_dataloader = DataLoader(eval_set, batch_size=args.eval_batch_size, **options)
    num_steps, steps_per_epoch = number_of_steps(args, accelerator, train_dataloader)
    optimizer = make_optimizer(unet, args)
    scheduler = make_scheduler(optimizer, args, accelerator, num_steps)
    ema = make_ema(args, accelerator, unet)
    prepared = accelerator.prepare(unet, optimizer, scheduler, train_dataloader, eval_dataloader)
    # From here on each process draws noise of its own.
    set_seed(args.seed, device_specific=True)
    Training(args, accelerator, prepared, parts, prompts, ema).run(num_steps, steps_per_epoch)

    accelerator.wait_for_everyone()
    save_unet(args, accelerator, prepared[0], ema)
    accelerator.end_training()


if __name__ == "__main__":
    main()
