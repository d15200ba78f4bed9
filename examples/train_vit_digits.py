"""Train a small vision transformer on scikit-learn's handwritten digits, with HuggingFace Accelerate.

An ordinary Accelerate script: it runs with `python`, with `accelerate launch` on any number of processes, and, without
any change, as a pipeline:

    accelerate launch --config examples/pfeife.yaml examples/train_vit_digits.py

Nothing is downloaded: the 1,797 images of 8 x 8 pixels come with scikit-learn, the model starts untrained.
"""

import argparse
import json
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=64, help="images per process and forward pass")
    parser.add_argument("--hidden_size", type=int, default=192)
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--label_smoothing", type=float, default=0.1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="outputs/train_vit_digits")
    parser.add_argument("--log_json", help="also write one JSON object per step and evaluation to this file")
    return parser.parse_args()


def load_datasets():
    """Training and evaluation images, scaled to mean 0 and deviation 1."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits.target)
    train_index, eval_index = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return (TensorDataset(images[index], labels[index]) for index in (train_index, eval_index))


def build_model(args):
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=8,
        patch_size=4,
        in_chans=1,
        num_classes=10,
        global_pool="avg",
        embed_dim=args.hidden_size,
        depth=args.num_layers,
        num_heads=max(1, args.hidden_size // 64),
    )


@torch.no_grad()
def evaluate(model, dataloader, gather=lambda values: values):
    """Accuracy and the number of images; every image counts once, however many processes share the work."""
    model.eval()
    num_correct, num_samples = 0, 0
    for images, labels in dataloader:
        predictions, labels = gather((model(images).argmax(dim=-1), labels))
        num_correct += (predictions == labels).sum().item()
        num_samples += len(labels)
    model.train()
    return num_correct / num_samples, num_samples


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    history = []

    train_set, eval_set = load_datasets()
    train_dataloader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    eval_dataloader = DataLoader(eval_set, batch_size=args.batch_size)

    model = build_model(args)
    accelerator.print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {len(train_set)} images")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.05)
    # A prepared scheduler advances once per process and step.
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps * accelerator.num_processes)
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )

    model.train()
    step, losses, num_images = 0, [], 0
    step_start = time.perf_counter()
    while step < args.steps:
        for images, labels in train_dataloader:
            with accelerator.accumulate(model):
                logits = model(images)
                loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            num_images += len(images) * accelerator.num_processes

            if accelerator.sync_gradients:
                step += 1
                seconds = time.perf_counter() - step_start
                step_loss, images_per_s = sum(losses) / len(losses), num_images / seconds
                lr = scheduler.get_last_lr()[0]
                if step % 10 == 0 or step == 1:
                    accelerator.print(
                        f"step {step:4d}  loss {step_loss:.4f}  lr {lr:.2e}  {images_per_s:6.0f} images/s"
                    )
                history.append(
                    dict(kind="step", step=step, loss=step_loss, learning_rate=lr, images_per_s=images_per_s)
                )
                losses, num_images = [], 0
                step_start = time.perf_counter()
                if step == args.steps:
                    break

    accuracy, num_samples = evaluate(model, eval_dataloader, accelerator.gather_for_metrics)
    accelerator.print(f"accuracy {accuracy:.4f} on {num_samples} images")

    accelerator.wait_for_everyone()
    accelerator.save_model(model, args.output_dir)

    if accelerator.is_main_process:
        # What was saved is an ordinary checkpoint: load it in this one process and evaluate it on the same images.
        reloaded = build_model(args)
        reloaded.load_state_dict(load_file(Path(args.output_dir) / "model.safetensors"))
        reloaded_accuracy, _ = evaluate(reloaded, DataLoader(eval_set, batch_size=args.batch_size))
        print(f"saved to {args.output_dir}; accuracy after reloading it {reloaded_accuracy:.4f}")
        history.append(
            dict(kind="eval", accuracy=accuracy, reloaded_accuracy=reloaded_accuracy, num_samples=num_samples)
        )
        if args.log_json:
            with open(args.log_json, "w") as log_file:
                log_file.writelines(json.dumps(record) + "\n" for record in history)
    accelerator.end_training()


if __name__ == "__main__":
    main()
