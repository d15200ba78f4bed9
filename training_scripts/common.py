"""What the training scripts share: arguments, optimizer, learning-rate schedule, checkpoints, and the log of a run.

Ignores: models, data, losses and the training loop, which each script has in full.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration

MODEL_CONFIGS = Path(__file__).resolve().parents[1] / "zoo" / "configs"


# -- arguments ---------------------------------------------------------------------------------------------------------


def positive(text):
    """An argument: a whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def not_negative(number):
    """An argument: a number, of the type `number`, from 0 on."""

    def read(text):
        value = number(text)
        if not value >= 0:
            raise argparse.ArgumentTypeError(f"{text} is not at least 0")
        return value

    read.__name__ = number.__name__  # argparse names it where the text is no number
    return read


def fraction(text):
    """An argument: a part of a whole, neither nothing nor all of it."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def add_training_arguments(parser, **defaults):
    """Arguments of every script; `defaults` are what this script wants instead of the defaults here."""
    run = parser.add_argument_group("run")
    run.add_argument("--output_dir", default="outputs", help="folder of metrics.jsonl, checkpoints and the final model")
    run.add_argument("--seed", type=int, default=0, help="of data order, dropout and new weights")
    run.add_argument(
        "--num_workers", type=not_negative(int), default=0, help="processes that load data, for each training process"
    )
    run.add_argument("--report_to", help="a tracker of Accelerate: tensorboard, wandb, ... or all")
    run.add_argument(
        "--logging_steps", type=positive, default=1, help="the loss is read and recorded every so many steps"
    )
    run.add_argument("--eval_steps", type=positive, help="evaluate every so many steps; without it, once at the end")
    run.add_argument("--checkpointing_steps", type=positive, help="save the training state every so many steps")
    run.add_argument(
        "--checkpoints_total_limit", type=positive, help="the oldest checkpoints above this number are removed"
    )
    run.add_argument("--resume_from_checkpoint", help="a checkpoint's folder, or `latest` of output_dir")

    steps = parser.add_argument_group("steps")
    steps.add_argument("--num_train_epochs", type=positive, default=1, help="rounds over the data")
    steps.add_argument("--max_train_steps", type=positive, help="optimizer steps; overrides num_train_epochs")
    steps.add_argument("--max_train_samples", type=positive, help="use only so many training items")
    steps.add_argument("--max_eval_samples", type=positive, help="use only so many evaluation items")
    steps.add_argument(
        "--train_batch_size", type=positive, default=16, help="items of one optimizer step, over all processes"
    )
    steps.add_argument(
        "--eval_batch_size", type=positive, default=16, help="items of one evaluation batch of a process"
    )
    steps.add_argument(
        "--gradient_accumulation_steps", type=positive, default=1, help="backward passes that share a step's items"
    )
    steps.add_argument("--gradient_checkpointing", action="store_true", help="compute activations twice, keep few")

    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--learning_rate", type=not_negative(float), default=1e-3, help="after warm-up")
    optimizer.add_argument(
        "--weight_decay", type=not_negative(float), default=0.01, help="not applied to biases and norms"
    )
    optimizer.add_argument("--adam_beta1", type=fraction, default=0.9)
    optimizer.add_argument("--adam_beta2", type=fraction, default=0.999)
    optimizer.add_argument("--adam_epsilon", type=float, default=1e-8)
    optimizer.add_argument(
        "--max_grad_norm", type=not_negative(float), default=1.0, help="0: gradients are not clipped"
    )
    optimizer.add_argument(
        "--lr_scheduler", choices=["cosine", "linear", "constant"], default="cosine", help="after warm-up"
    )
    optimizer.add_argument(
        "--lr_warmup_steps",
        type=not_negative(int),
        default=10,
        help="steps of linear warm-up; the first one has rate 0",
    )
    parser.set_defaults(**defaults)


def parse_arguments(parser):
    """The arguments, or a usage error where two of them contradict each other."""
    args = parser.parse_args()
    if args.report_to not in (None, "none", "all", *(str(tracker.value) for tracker in get_available_trackers())):
        parser.error(f"--report_to {args.report_to}: this tracker is unknown or its package is not installed")
    # `--checkpointing_steps 4` of a run that is not resumed must not mix with what an earlier run left behind.
    if args.checkpointing_steps and not args.resume_from_checkpoint and checkpoints(args.output_dir):
        parser.error(f"{args.output_dir} has checkpoints: --resume_from_checkpoint latest, or another --output_dir")
    if args.resume_from_checkpoint not in (None, "latest") and not Path(args.resume_from_checkpoint).is_dir():
        parser.error(f"--resume_from_checkpoint {args.resume_from_checkpoint}: no such folder")
    if Path(args.output_dir).exists() and not Path(args.output_dir).is_dir():
        parser.error(f"--output_dir {args.output_dir} is a file")
    return args


def model_config_folder(name):
    """The folder of a model configuration: a path, or a name below zoo/configs."""
    for folder in (Path(name), MODEL_CONFIGS / name):
        if (folder / "config.json").is_file():
            return folder
    known = ", ".join(sorted(folder.name for folder in MODEL_CONFIGS.iterdir())) if MODEL_CONFIGS.is_dir() else "none"
    raise SystemExit(f"--model {name}: no such folder with a config.json, and not one of {MODEL_CONFIGS}: {known}")


# -- accelerator, optimizer, schedule ----------------------------------------------------------------------------------


def make_accelerator(args, **kwargs):
    """An Accelerator that keeps checkpoints in output_dir; precision and processes are the launcher's choice."""
    project = ProjectConfiguration(
        project_dir=args.output_dir,
        logging_dir=str(Path(args.output_dir) / "logs"),
        automatic_checkpoint_naming=True,
        total_limit=args.checkpoints_total_limit,
    )
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=None if args.report_to == "none" else args.report_to,
        project_config=project,
        # Every epoch's order follows from the seed, whatever the number of processes, and also after a resume.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        **kwargs,
    )
    if accelerator.log_with:
        config = {name: value for name, value in vars(args).items() if isinstance(value, (int, float, str))}
        accelerator.init_trackers(Path(sys.argv[0]).stem, config=config)
    return accelerator


def batch_size_per_process(args, accelerator):
    """Items in one batch of one process, so that a step always takes `train_batch_size` items in all."""
    parts = accelerator.num_processes * args.gradient_accumulation_steps
    if args.train_batch_size % parts:
        raise SystemExit(
            f"--train_batch_size {args.train_batch_size} cannot be divided among {accelerator.num_processes} processes"
            f" x {args.gradient_accumulation_steps} accumulation steps"
        )
    return args.train_batch_size // parts


def make_optimizer(model, args):
    """AdamW over what is trained; biases and the weights of norms do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


def make_scheduler(optimizer, args, accelerator, num_steps):
    """Linear warm-up from 0, then `lr_scheduler` down to 0 at step `num_steps`."""
    # A prepared scheduler advances once per process and step.
    warmup = args.lr_warmup_steps * accelerator.num_processes
    total = num_steps * accelerator.num_processes

    def factor(step):
        if step < warmup:
            return step / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        match args.lr_scheduler:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                return 1 - done
            case "constant":
                return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def number_of_steps(args, accelerator, train_dataloader):
    """(optimizer steps of the whole run, of an epoch). The dataloader is not prepared yet, and drops its last batch."""
    num_batches = len(train_dataloader) // accelerator.num_processes
    per_epoch = math.ceil(num_batches / args.gradient_accumulation_steps)
    if per_epoch == 0:
        raise SystemExit(f"--train_batch_size {args.train_batch_size} is larger than the training set")
    return args.max_train_steps or args.num_train_epochs * per_epoch, per_epoch


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Progress:
    """Optimizer steps done; part of every checkpoint by `accelerator.register_for_checkpointing`."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def position(self, args, steps_per_epoch):
        """(epoch, batches of it that are done)."""
        epoch, steps = divmod(self.step, steps_per_epoch)
        return epoch, steps * args.gradient_accumulation_steps


def checkpoints(output_dir):
    """Folders of the saved training states, oldest first."""
    found = {folder: folder.name.rpartition("_")[2] for folder in Path(output_dir).glob("checkpoints/checkpoint_*")}
    return sorted((folder for folder, step in found.items() if step.isdecimal()), key=lambda folder: int(found[folder]))


def save_checkpoint(accelerator, progress):
    """Save model, optimizer, schedule, generators and progress as <output_dir>/checkpoints/checkpoint_<step>."""
    folder = Path(accelerator.project_dir) / "checkpoints" / f"checkpoint_{progress.step}"
    # After a resume from an earlier one, steps are taken, and saved, again.
    if accelerator.is_main_process and folder.exists():
        shutil.rmtree(folder)
    accelerator.wait_for_everyone()
    accelerator.project_configuration.iteration = progress.step
    accelerator.save_state()


def resume(accelerator, args, progress):
    """Load the checkpoint that was asked for, if any. `progress` has to be registered for checkpointing."""
    folder = args.resume_from_checkpoint
    if folder == "latest":
        saved = checkpoints(args.output_dir)
        # The registered progress is what a checkpoint gets last: without it, its run was ended while saving.
        whole = [folder for folder in saved if (folder / "custom_checkpoint_0.pkl").is_file()]
        if saved and saved[-1:] != whole[-1:]:
            accelerator.print(f"{saved[-1]} is not complete: an earlier one is used")
        folder = next(reversed(whole), None)
        if folder is None:
            accelerator.print(f"no checkpoint in {args.output_dir}: training starts from the beginning")
    if folder is not None:
        if not (Path(folder) / "custom_checkpoint_0.pkl").is_file():
            raise SystemExit(f"--resume_from_checkpoint {folder}: not a complete checkpoint of this script")
        accelerator.load_state(str(folder))
        accelerator.print(f"resumed from {folder} at step {progress.step}")


# -- the log of a run --------------------------------------------------------------------------------------------------


class RunLog:
    """metrics.jsonl, trackers and the console: what is measured in a run.

    One JSON object a line: `{"kind": "step", "step", "loss", "lr", "grad_norm", "items_per_s", "tokens_per_s"}`,
    `{"kind": "eval", "step", ...}`, and at the end `{"kind": "summary", "steps", "items_per_s", "tokens_per_s",
    "peak_memory_bytes": [of each process], ...}`, with speeds that leave out the first step of the run.
    """

    def __init__(self, accelerator, args, progress):
        self.accelerator, self.logging_steps = accelerator, args.logging_steps
        self.path = Path(args.output_dir) / "metrics.jsonl"
        if accelerator.is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = []
            if args.resume_from_checkpoint and self.path.is_file():
                # Steps after the checkpoint are taken, and recorded, again.
                records = [json.loads(line) for line in self.path.read_text().splitlines()]
                kept = [r for r in records if r["kind"] != "summary" and r["step"] <= progress.step]
            self.path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self.steps, self.items, self.tokens, self.seconds = 0, 0, 0, 0.0  # since the first step of this run
        self._start_record()

    def add(self, loss, *, items, tokens=0):
        """A backward pass has been done: its loss, and the items and tokens of this process's batch."""
        self._loss = self._loss + loss.detach().float()
        self._batches += 1
        self._items += items * self.accelerator.num_processes
        self._tokens += tokens * self.accelerator.num_processes

    def step(self, step, *, lr, grad_norm=None):
        """An optimizer step has been done."""
        self._steps += 1
        if self.steps and step % self.logging_steps:
            return
        loss = self.accelerator.reduce(self._loss / self._batches, reduction="mean").item()
        # Reading the loss has waited for the step: this is the time to look at the clock.
        seconds = time.perf_counter() - self._start_s
        grad_norm = None if grad_norm is None else float(grad_norm)
        speeds = _speeds(self._items, self._tokens, seconds)
        self._write(dict(kind="step", step=step, loss=loss, lr=lr, grad_norm=grad_norm, **speeds))
        if self.steps:
            self.items += self._items
            self.tokens += self._tokens
            self.seconds += seconds
        self.steps += self._steps
        self._start_record()

    def evaluation(self, step, **values):
        """An evaluation has been done."""
        self._write(dict(kind="eval", step=step, **values))

    def summary(self, **values):
        """The run is over: its speed without the first step, and the peak memory of each process."""
        speeds = _speeds(self.items, self.tokens, self.seconds) if self.items else {}
        peaks = peak_memory_bytes(self.accelerator, self.path.parent / "peak_memory")
        steps = self.steps + self._steps  # the last ones are not recorded where logging_steps does not divide them
        self._write(dict(kind="summary", steps=steps, **speeds, peak_memory_bytes=peaks, **values))

    @contextlib.contextmanager
    def paused(self):
        """What is done inside, such as an evaluation or saving, takes no time."""
        start_s = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - start_s

    def _start_record(self):
        self._loss, self._batches, self._steps, self._items, self._tokens = torch.zeros(()), 0, 0, 0, 0
        self._loss = self._loss.to(self.accelerator.device)
        self._start_s = time.perf_counter()

    def _write(self, record):
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        self.accelerator.print("  ".join(f"{name} {_short(value)}" for name, value in record.items() if name != "kind"))
        # Without trackers this does nothing.
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float)) and name != "step"}
        prefix = {"step": "train", "eval": "eval", "summary": "summary"}[record["kind"]]
        step = record.get("step", self.steps)
        self.accelerator.log({f"{prefix}/{name}": value for name, value in numbers.items()}, step=step)


def _speeds(items, tokens, seconds):
    return {"items_per_s": items / seconds, "tokens_per_s": tokens / seconds if tokens else None}


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else value


def peak_memory_bytes(accelerator, folder):
    """The largest memory of each process of the launch, on the GPU where there is one. All processes must call."""
    if torch.cuda.is_available():
        own = torch.cuda.max_memory_allocated()
    else:
        # In KiB; macOS alone counts bytes.
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    # Through files: memory is a matter of processes, whatever group of them the engine makes one model of.
    folder.mkdir(parents=True, exist_ok=True)
    rank, num_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    (folder / f"{rank}.txt").write_text(str(own))
    accelerator.wait_for_everyone()
    files = [folder / f"{rank}.txt" for rank in range(num_processes)]
    # Another host's are missing, unless output_dir is shared.
    return [int(file.read_text()) for file in files if file.is_file()]
