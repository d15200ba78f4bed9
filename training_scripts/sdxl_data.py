"""Pictures with captions for `train_sdxl.py`: a dataset of the hub, a local folder, or crops of two photographs.

Ignores: aspect-ratio buckets. Every picture is cut to a square.
"""

import math
import random

import numpy as np
import torch
from PIL import Image
from splits import check_columns, load_splits
from torch.utils.data import Dataset

HELD_OUT = 0.2
"""Of each photograph's width: training crops lie to the left of it, held-out crops in it. At most so much of a data
set's pictures."""


def load_examples(args, split):
    """`train` or `validation`: something with a length that gives {"image": PIL, "text": str} by index.

    Crops of the photographs also say where they come from: "original_size" and "top_left".
    """
    if args.dataset_name is None and args.train_dir is None:
        count = (args.max_train_samples or 512) if split == "train" else args.max_eval_samples
        return photo_crops(count, side=args.resolution, held_out=split != "train", seed=args.seed)
    # A folder of pictures has a metadata.csv or metadata.jsonl that gives each `file_name` its caption.
    pictures = load_splits(args, "imagefolder")["train"]
    check_columns(pictures, args.image_column, args.caption_column)
    pictures = pictures.select_columns([args.image_column, args.caption_column])
    pictures = pictures.rename_columns({args.image_column: "image", args.caption_column: "text"})
    # One order for all processes, of which the last pictures are held out.
    pictures = pictures.shuffle(seed=args.seed)
    num_train = len(pictures) - min(args.max_eval_samples, math.ceil(HELD_OUT * len(pictures)))
    if split == "train":
        return pictures.select(range(min(num_train, args.max_train_samples or num_train)))
    return pictures.select(range(num_train, len(pictures)))


def photo_crops(count, *, side, held_out, seed):
    """Square crops of scikit-learn's two sample photographs, captioned by what they show and where they lie."""
    from sklearn.datasets import load_sample_images

    bunch = load_sample_images()
    names = [str(path).replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0] for path in bunch.filenames]
    draw = random.Random(f"{seed}/{held_out}")
    crops = []
    for number in range(count):
        name, photo = names[number % len(names)], bunch.images[number % len(names)]
        height, width = photo.shape[:2]
        border = int(width * (1 - HELD_OUT))
        left_most, right_most = (border, width) if held_out else (0, border)
        size = draw.randint(min(side, right_most - left_most), right_most - left_most if held_out else height // 2)
        top, left = draw.randint(0, height - size), draw.randint(left_most, right_most - size)
        crops.append(
            {
                "image": Image.fromarray(photo[top : top + size, left : left + size]),
                "text": f"{name}, {_place(top + size / 2, left + size / 2, height, width)}",
                "original_size": (height, width),
                "top_left": (top, left),
            }
        )
    return crops


def _place(y, x, height, width):
    row = ("top", "middle", "bottom")[int(3 * y / height)]
    column = ("left", "centre", "right")[int(3 * x / width)]
    return f"{row} {column}"


class CaptionedPictures(Dataset):
    """Examples as the model reads them: pixels in -1..1, token ids of both text encoders, sizes and corners.

    Random crops and flips follow from the seed, `epoch` and the index, so that neither the number of processes or of
    workers nor a resumed run changes them.
    """

    def __init__(self, examples, tokenizers, *, resolution, random_crop=False, random_flip=False, seed=0):
        self.examples, self.tokenizers = examples, tokenizers
        self.resolution, self.random_crop, self.random_flip = resolution, random_crop, random_flip
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        example = self.examples[index]
        image, side = example["image"].convert("RGB"), self.resolution
        original_size = example.get("original_size") or (image.height, image.width)
        scale = side / min(image.size)
        image = image.resize([max(side, round(scale * length)) for length in image.size], Image.Resampling.BILINEAR)
        draw = random.Random(f"{self.seed}/{self.epoch}/{index}")
        if self.random_flip and draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        if self.random_crop:
            left, top = draw.randint(0, image.width - side), draw.randint(0, image.height - side)
        pixels = np.asarray(image.crop((left, top, left + side, top + side)), dtype=np.float32)
        item = {
            "index": torch.tensor(index),
            "pixel_values": torch.from_numpy(pixels / 127.5 - 1.0).permute(2, 0, 1).contiguous(),
            # SDXL is told how large a picture was, and from where it was cut.
            "time_ids": torch.tensor([*original_size, *example.get("top_left", (top, left)), side, side]).float(),
        }
        for number, tokenizer in enumerate(self.tokenizers):
            item[f"input_ids_{number}"] = tokens(tokenizer, [example["text"]])[0]
        return item


class CachedPictures(Dataset):
    """What is left of examples once the frozen models have run: no pixels and no token ids."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def tokens(tokenizer, texts):
    """Token ids, all of one length."""
    return tokenizer(
        list(texts),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
