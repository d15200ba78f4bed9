"""Train a vision transformer of timm to classify images, with HuggingFace Accelerate.

    accelerate launch training_scripts/train_vit.py
    accelerate launch training_scripts/train_vit.py --model vit-g14 --dataset_name ILSVRC/imagenet-1k
    accelerate launch training_scripts/train_vit.py --model vit_base_patch16_224 --pretrained --train_dir photos/

Without a data set it learns scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels); nothing is downloaded.
"""

import argparse
import json
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from common import (
    Progress,
    RunLog,
    add_training_arguments,
    batch_size_per_process,
    fraction,
    make_accelerator,
    make_optimizer,
    make_scheduler,
    model_config_folder,
    number_of_steps,
    parse_arguments,
    resume,
    save_checkpoint,
)
from splits import check_columns, check_sizes, load_splits
from timm.data import create_transform, resolve_data_config
from torch.utils.data import DataLoader, Dataset, Subset


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model", default="vit-g14-tiny", help="a folder with config.json, a name in zoo/configs, or a name of timm"
    )
    parser.add_argument("--pretrained", nargs="?", const=True, help="start from weights: timm's own, or a local file")
    parser.add_argument("--dataset_name", help="a data set of the hub with images and labels")
    parser.add_argument("--dataset_config_name")
    parser.add_argument(
        "--train_dir",
        help="a local folder of images: one sub-folder for each class, or train/ and validation/ with these",
    )
    parser.add_argument("--image_column", default="image")
    parser.add_argument("--label_column", default="label")
    parser.add_argument(
        "--eval_fraction", type=fraction, default=0.2, help="held out where the data set has no validation split"
    )
    parser.add_argument("--label_smoothing", type=float, default=0.1)
    add_training_arguments(
        parser, output_dir="outputs/train_vit", train_batch_size=64, eval_batch_size=64, weight_decay=0.05,
        num_train_epochs=20, lr_warmup_steps=50,
    )  # fmt: skip
    return parse_arguments(parser)


# -- data --------------------------------------------------------------------------------------------------------------


class LabelledImages(Dataset):
    """Items {"pixel_values": tensor, "labels": int} of rows {image_column: PIL image, label_column: int}."""

    def __init__(self, rows, transform, image_column, label_column):
        self.rows, self.transform = rows, transform
        self.image_column, self.label_column = image_column, label_column

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"pixel_values": self.transform(row[self.image_column].convert("RGB")), "labels": row[self.label_column]}


def load_rows(args):
    """(training rows, evaluation rows, number of classes)."""
    if args.dataset_name is None and args.train_dir is None:
        rows, num_classes = digits(), 10
        splits = None
    else:
        splits = load_splits(args, "imagefolder")
        rows = splits["train"]
        check_columns(rows, args.image_column, args.label_column)
        num_classes = getattr(rows.features[args.label_column], "num_classes", None)
        if num_classes is None or None in rows[args.label_column]:
            # `datasets` takes folders with names such as `test` for splits, not for classes.
            raise SystemExit(f"the column {args.label_column} does not give each image its class")
    held_out = next((splits[name] for name in ("validation", "test") if splits and name in splits), None)
    if held_out is None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        num_held_out = max(1, round(len(rows) * args.eval_fraction))
        rows, held_out = Subset(rows, order[num_held_out:]), Subset(rows, order[:num_held_out])
    return first(rows, args.max_train_samples), first(held_out, args.max_eval_samples), num_classes


def digits():
    """scikit-learn's handwritten digits as rows of an image and its label."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images * (255 / 16)).astype("uint8")
    return [{"image": Image.fromarray(i), "label": int(n)} for i, n in zip(images, data.target, strict=True)]


def first(rows, count):
    return rows if count is None else Subset(rows, range(min(count, len(rows))))


def make_datasets(args, train_rows, eval_rows, model):
    """The rows as tensors, in the size and with the normalisation that the model wants."""
    size = model.patch_embed.img_size
    data_config = resolve_data_config({"input_size": (3, *size)}, model=model)
    keys = ("input_size", "interpolation", "mean", "std")
    common = {key: data_config[key] for key in keys}
    eval_transform = create_transform(**common, crop_pct=1.0)
    # A digit's size and direction belong to it; photographs are cropped and mirrored at random.
    is_photos = args.dataset_name is not None or args.train_dir is not None
    train_transform = create_transform(**common, is_training=True) if is_photos else eval_transform
    return (
        LabelledImages(train_rows, train_transform, args.image_column, args.label_column),
        LabelledImages(eval_rows, eval_transform, args.image_column, args.label_column),
    )


# -- model -------------------------------------------------------------------------------------------------------------


def build_model(args, num_classes):
    if timm.is_model(args.model) or ":" in args.model:  # "hf_hub:...", "local-dir:..."
        name, model_args = args.model, {}
    else:
        config = json.loads((model_config_folder(args.model) / "config.json").read_text())
        name, model_args = config["architecture"], config["model_args"]
    if isinstance(args.pretrained, str):
        model_args = {**model_args, "checkpoint_path": args.pretrained}
    model = timm.create_model(name, **{**model_args, "num_classes": num_classes}, pretrained=args.pretrained is True)
    model.set_grad_checkpointing(args.gradient_checkpointing)
    # What FSDP wraps, as in models of transformers, which say it themselves.
    model._no_split_modules = ["Block"]
    return model


@torch.no_grad()
def evaluate(model, dataloader, accelerator):
    """Accuracy and mean loss; every image counts once, however many processes share the work."""
    model.eval()
    num_correct, loss_sum, num_images = 0, 0.0, 0
    for batch in dataloader:
        logits = model(batch["pixel_values"])
        losses = F.cross_entropy(logits.float(), batch["labels"], reduction="none")
        predictions, losses, labels = accelerator.gather_for_metrics((logits.argmax(dim=-1), losses, batch["labels"]))
        num_correct += (predictions == labels).sum().item()
        loss_sum += losses.sum().item()
        num_images += len(labels)
    model.train()
    return {"accuracy": num_correct / num_images, "loss": loss_sum / num_images, "num_items": num_images}


# -- training ----------------------------------------------------------------------------------------------------------


def train(args, accelerator, prepared, progress, num_steps, steps_per_epoch, tokens_per_image):
    model, optimizer, scheduler, train_dataloader, eval_dataloader = prepared
    log = RunLog(accelerator, args, progress)
    model.train()
    while progress.step < num_steps:
        epoch, num_done = progress.position(args, steps_per_epoch)
        train_dataloader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(train_dataloader, num_done) if num_done else train_dataloader
        for batch in rest:
            grad_norm = None
            with accelerator.accumulate(model):
                logits = model(batch["pixel_values"])
                loss = F.cross_entropy(logits, batch["labels"], label_smoothing=args.label_smoothing)
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                lr = scheduler.get_last_lr()[0]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            num_images = len(batch["labels"])
            log.add(loss, items=num_images, tokens=num_images * tokens_per_image)
            if not accelerator.sync_gradients:
                continue

            progress.step += 1
            log.step(progress.step, lr=lr, grad_norm=grad_norm)
            is_last = progress.step == num_steps
            with log.paused():
                if is_last or (args.eval_steps and progress.step % args.eval_steps == 0):
                    log.evaluation(progress.step, **evaluate(model, eval_dataloader, accelerator))
                if args.checkpointing_steps and progress.step % args.checkpointing_steps == 0:
                    save_checkpoint(accelerator, progress)
            if is_last:
                break
    log.summary()


def main():
    args = parse_args()
    accelerator = make_accelerator(args)
    set_seed(args.seed)

    train_rows, eval_rows, num_classes = load_rows(args)
    model = build_model(args, num_classes)
    check_sizes(train_rows, eval_rows)
    tokens_per_image = model.patch_embed.num_patches + model.num_prefix_tokens
    train_set, eval_set = make_datasets(args, train_rows, eval_rows, model)
    batch_size = batch_size_per_process(args, accelerator)
    options = {"num_workers": args.num_workers, "pin_memory": torch.cuda.is_available()}
    train_dataloader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True, **options)
    eval_dataloader = DataLoader(eval_set, batch_size=args.eval_batch_size, **options)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(f"{args.model}: {num_parameters / 1e6:.1f} M parameters, {len(train_set)} images")

    num_steps, steps_per_epoch = number_of_steps(args, accelerator, train_dataloader)
    optimizer = make_optimizer(model, args)
    scheduler = make_scheduler(optimizer, args, accelerator, num_steps)
    prepared = accelerator.prepare(model, optimizer, scheduler, train_dataloader, eval_dataloader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    resume(accelerator, args, progress)
    train(args, accelerator, prepared, progress, num_steps, steps_per_epoch, tokens_per_image)

    accelerator.wait_for_everyone()
    accelerator.save_model(prepared[0], str(Path(args.output_dir) / "model"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
