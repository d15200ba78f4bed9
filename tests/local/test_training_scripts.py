"""The training scripts in one process: their data, arguments and configurations."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from tests.launching import run_command
from tests.training_scripts import CONFIGS, FOLDER, load

pytestmark = [pytest.mark.local, pytest.mark.timeout(200)]

SMALL = {
    "train_vit.py": ("--train_batch_size=4", "--lr_warmup_steps=1"),
    "train_llama.py": ("--train_batch_size=2", "--block_size=16", "--lr_warmup_steps=1"),
}


common, generate, splits = (load(name) for name in ("common.py", "configs/generate.py", "splits.py"))


# -- configurations ----------------------------------------------------------------------------------------------------


def test_configuration_files_are_what_the_generator_writes():
    wanted = {f"{name}.yaml": generate.text(name, options) for name, options in generate.configurations().items()}
    assert {path.name: path.read_text() for path in CONFIGS.glob("*.yaml")} == wanted
    engines = ("ddp", "fsdp2", "zero2", "zero3", "pfeife")
    gpu = {f"{e}_gpu{n}_{p}" for e in engines for n in (2, 4, 8) for p in ("fp16", "fp32")}
    assert set(generate.configurations()) == gpu | {"plain_cpu", "ddp_cpu2", "pfeife_cpu2", "pfeife_cpu3"}


def test_accelerate_reads_every_configuration(tmp_path):
    script = tmp_path / "read.py"
    script.write_text(
        "import os, sys\n"
        "import torch\n"
        "from accelerate.commands.config.config_args import load_config_from_file\n"
        "for path in sys.argv[1:]:\n"
        "    config = load_config_from_file(path)\n"
        "    pipeline = os.environ.pop('PFEIFE_ENABLED', 'false')\n"
        "    for name in [name for name in os.environ if name.startswith('PFEIFE_')]:\n"
        "        del os.environ[name]\n"
        "    print(config.distributed_type.value, config.num_processes, config.mixed_precision, pipeline)\n"
    )
    paths = sorted(CONFIGS.glob("*.yaml"))
    result = run_command([sys.executable, str(script), *map(str, paths)], env={"PYTHONPATH": _pythonpath()}).check()
    for path, line in zip(paths, result.stdout.splitlines(), strict=True):
        options = yaml.safe_load(path.read_text())
        distributed_type, num_processes, precision, pipeline = line.split()
        # A pipeline of CPU processes is started by the launcher for GPUs.
        started_as = {"MULTI_CPU": "MULTI_GPU"}.get(options["distributed_type"], options["distributed_type"])
        assert distributed_type == started_as and int(num_processes) == options["num_processes"]
        assert precision == options["mixed_precision"] and (pipeline == "true") == path.stem.startswith("pfeife")


def _pythonpath() -> str | None:
    return os.environ.get("PYTHONPATH")


# -- the scripts -------------------------------------------------------------------------------------------------------


OFFLINE = """
import runpy, socket, sys
def refuse(host, *args, **kwargs):
    raise AssertionError(f"looks up {host}")
socket.getaddrinfo = refuse
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_offline(script: str, folder: Path, *arguments: str) -> list[dict]:
    """The records of a run that is not told to be offline, and may not look up any host."""
    wrapper = folder / "offline.py"
    wrapper.write_text(OFFLINE)
    command = [sys.executable, str(wrapper), str(FOLDER / script), f"--output_dir={folder / 'out'}"]
    command += ["--max_train_steps=2", "--max_eval_samples=4", *SMALL[script], *arguments]
    run_command(command, env={"HF_HUB_OFFLINE": None}).check()
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_images_of_a_local_folder_are_classified(tmp_path):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for label in ("cat", "dog", "fish"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(6):
            pixels = torch.randint(0, 256, (40, 30, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(tmp_path / "images" / label / f"{number}.png")
    records = run_offline("train_vit.py", tmp_path, f"--train_dir={tmp_path / 'images'}")
    assert [record["kind"] for record in records] == ["step", "step", "eval", "summary"]
    from safetensors.torch import load_file

    assert load_file(tmp_path / "out" / "model" / "model.safetensors")["head.weight"].shape[0] == 3


def test_text_files_of_a_local_folder_and_local_weights_are_trained_on(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"This is text number {number}.\nIt has two lines.\n")
    first = run_offline("train_llama.py", tmp_path, f"--train_dir={tmp_path / 'texts'}")
    saved = tmp_path / "again"
    saved.mkdir()
    pretrained = (f"--pretrained={tmp_path / 'out' / 'model'}", f"--train_dir={tmp_path / 'texts'}")
    second = run_offline("train_llama.py", saved, *pretrained)
    assert [record["kind"] for record in first] == ["step", "step", "eval", "summary"]
    # It goes on from what the first run has learnt.
    assert second[0]["loss"] < first[0]["loss"] - 0.05


def test_scripts_refuse_what_cannot_be_meant(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints" / "checkpoint_10").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint_9").mkdir()
    assert [path.name for path in common.checkpoints(tmp_path)] == ["checkpoint_9", "checkpoint_10"]
    unknown = "--report_to tensorbored: this tracker is unknown or its package is not installed"
    mixed = f"{tmp_path} has checkpoints: --resume_from_checkpoint latest, or another --output_dir"
    for argument, message in (("--report_to=tensorbored", unknown), ("--checkpointing_steps=2", mixed)):
        monkeypatch.setattr(sys, "argv", ["train.py", f"--output_dir={tmp_path}", argument])
        parser = argparse.ArgumentParser()
        common.add_training_arguments(parser)
        with pytest.raises(SystemExit):
            common.parse_arguments(parser)
        assert message in capsys.readouterr().err
    args = _arguments(train_batch_size=8, gradient_accumulation_steps=2)
    assert common.batch_size_per_process(args, Processes(2)) == 2
    with pytest.raises(SystemExit, match="--train_batch_size 8 cannot be divided among 3 processes x 2 accumulation"):
        common.batch_size_per_process(args, Processes(3))
    with pytest.raises(SystemExit, match=r"--model vit-g15: no such folder .* vit-g14, vit-g14-tiny"):
        common.model_config_folder("vit-g15")


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("--max_train_steps=0", "0 is not at least 1"),
        ("--logging_steps=0", "0 is not at least 1"),
        ("--train_batch_size=0", "0 is not at least 1"),
        ("--gradient_accumulation_steps=0", "0 is not at least 1"),
        ("--max_eval_samples=0", "0 is not at least 1"),
        ("--num_workers=-1", "-1 is not at least 0"),
        ("--learning_rate=nan", "nan is not at least 0"),
        ("--learning_rate=fast", "invalid float value: 'fast'"),
        ("--adam_beta2=1.5", "1.5 is not between 0 and 1"),
        ("--resume_from_checkpoint=nowhere", "--resume_from_checkpoint nowhere: no such folder"),
    ],
)
def test_numbers_and_folders_that_cannot_be_meant_end_with_a_word(argument, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", argument])
    parser = argparse.ArgumentParser()
    common.add_training_arguments(parser)
    with pytest.raises(SystemExit):
        common.parse_arguments(parser)
    assert why in capsys.readouterr().err


def test_data_sets_that_cannot_be_trained_on_end_with_a_word(tmp_path):
    from datasets import Dataset

    args = argparse.Namespace(dataset_name=None, train_dir=str(tmp_path))

    with pytest.raises(SystemExit, match=r"cannot be read: .* doesn't contain any data files"):
        splits.load_splits(args, "text")
    (tmp_path / "test_of_it.txt").write_text("Named like a split.")
    with pytest.raises(SystemExit, match="has nothing to train on, only: test"):
        splits.load_splits(args, "text")
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(SystemExit, match=f"{tmp_path} cannot be read: .*codec can't decode"):
        splits.load_splits(args, "text")
    rows = Dataset.from_dict({"text": ["a"], "picture": [1]})
    splits.check_columns(rows, "text")
    with pytest.raises(SystemExit, match=r"columns \['text', 'picture'\], not \['image', 'label'\]"):
        splits.check_columns(rows, "text", "label", "image")
    splits.check_sizes([1], [2])
    with pytest.raises(SystemExit, match="nothing to evaluate on: 1 training and 0 evaluation items"):
        splits.check_sizes([1], [])
    with pytest.raises(SystemExit, match="nothing to train on: 0 training and 1 evaluation items"):
        splits.check_sizes([], [1])


@pytest.mark.parametrize("classes", [("car", "test", "train"), ("car",)])
def test_folders_that_do_not_give_classes_are_refused(classes, tmp_path, monkeypatch):
    from PIL import Image

    for name in classes:
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    monkeypatch.syspath_prepend(str(FOLDER))
    train_vit = load(FOLDER / "train_vit.py")
    monkeypatch.setattr(sys, "argv", ["train_vit.py", f"--train_dir={tmp_path}"])
    with pytest.raises(SystemExit, match="label"):
        train_vit.load_rows(train_vit.parse_args())


def test_of_a_single_text_the_end_is_held_out(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("".join(chr(97 + number // 16) for number in range(16 * 20)))
    monkeypatch.syspath_prepend(str(FOLDER))
    train_llama = load(FOLDER / "train_llama.py")
    arguments = [f"--train_dir={tmp_path}", "--block_size=16", "--eval_fraction=0.25"]
    monkeypatch.setattr(sys, "argv", ["train_llama.py", *arguments])
    args = train_llama.parse_args()
    tokenizer = train_llama.load_tokenizer(args)
    train_set, eval_set = train_llama.load_blocks(args, tokenizer)
    texts = [[tokenizer.decode(block)[0] for block in blocks["input_ids"]] for blocks in (train_set, eval_set)]
    assert texts == [list("abcdefghijklmno"), list("pqrst")]


SAVING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import argparse, common

parser = argparse.ArgumentParser()
common.add_training_arguments(parser)
args = common.parse_arguments(parser)
accelerator = common.make_accelerator(args)
progress = common.Progress()
accelerator.register_for_checkpointing(progress)
common.resume(accelerator, args, progress)
for _ in range(2):
    progress.step += 2
    common.save_checkpoint(accelerator, progress)
print("at", progress.step)
"""


def test_a_run_resumes_before_checkpoints_that_it_saves_again_and_from_whole_ones_only(tmp_path):
    script = tmp_path / "saving.py"
    script.write_text(SAVING)
    saved = tmp_path / "checkpoints"

    def run(*arguments: str):
        command = [sys.executable, str(script), str(FOLDER), f"--output_dir={tmp_path}", *arguments]
        return run_command(command, fresh=False)

    assert run().check().lines("at") == ["at 4"]
    assert run(f"--resume_from_checkpoint={saved / 'checkpoint_2'}").check().lines("at") == ["at 6"]
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint_2", "checkpoint_4", "checkpoint_6"]
    # Ended while it was saved, and a copy that somebody keeps.
    (saved / "checkpoint_6" / "custom_checkpoint_0.pkl").unlink()
    (saved / "checkpoint_best").mkdir()
    result = run("--resume_from_checkpoint=latest").check()
    assert f"{saved / 'checkpoint_6'} is not complete: an earlier one is used" in result.stdout
    assert result.lines("at") == ["at 8"]
    refused = run(f"--resume_from_checkpoint={saved / 'checkpoint_best'}")
    assert refused.returncode == 1 and refused.stderr.strip().endswith("not a complete checkpoint of this script")


# -- what the scripts share --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processes:
    """What the helpers want to know of an accelerator."""

    num_processes: int


def _arguments(**changed: object):
    parser = argparse.ArgumentParser()
    common.add_training_arguments(parser, **changed)
    return parser.parse_args([])


def test_biases_norms_and_frozen_parameters_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    optimizer = common.make_optimizer(model, _arguments(weight_decay=0.5))
    groups = [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in optimizer.param_groups]
    assert groups == [(0.5, [(2, 3)]), (0.0, [(3,), (3,), (3,), (2,)])]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
        ("constant", [0, 0.5, 1, 1, 1, 1, 1]),
        ("cosine", [0, 0.5, 1, None, 0.5, None, 0]),
    ],
)
@pytest.mark.parametrize("num_processes", [1, 3])
def test_the_learning_rate_warms_up_and_ends_at_zero_for_any_number_of_processes(name, wanted, num_processes):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    args = _arguments(lr_scheduler=name, lr_warmup_steps=2)
    scheduler = common.make_scheduler(optimizer, args, Processes(num_processes), num_steps=6)
    rates = []
    for _ in range(7):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        for _ in range(num_processes):
            scheduler.step()
    for rate, value in zip(rates, wanted, strict=True):
        assert value is None or rate == pytest.approx(value, abs=1e-9)
    assert rates[2:] == sorted(rates[2:], reverse=True)


TRACKED = """
import json, sys
import torch
sys.path.insert(0, sys.argv.pop(1))
import argparse, common
from accelerate.tracking import GeneralTracker

class Printing(GeneralTracker):
    name, requires_logging_directory, tracker = "printing", False, None
    def store_init_configuration(self, values):
        print("config", json.dumps(values))
    def log(self, values, step=None, **kwargs):
        print("values", json.dumps([step, values]))

parser = argparse.ArgumentParser()
common.add_training_arguments(parser)
args = common.parse_arguments(parser)
args.report_to = Printing()
accelerator = common.make_accelerator(args)
log = common.RunLog(accelerator, args, common.Progress())
for step in range(1, 5):
    log.add(torch.tensor(float(step)), items=2, tokens=10)
    log.step(step, lr=0.5)
log.evaluation(4, accuracy=0.25)
log.summary()
"""


def test_trackers_get_what_is_recorded_and_losses_are_means_of_what_lies_between(tmp_path):
    script = tmp_path / "tracked.py"
    script.write_text(TRACKED)
    command = [sys.executable, str(script), str(FOLDER), f"--output_dir={tmp_path}", "--logging_steps=2", "--seed=3"]
    result = run_command(command, fresh=False).check()
    (config,) = (json.loads(line.partition(" ")[2]) for line in result.lines("config"))
    assert config["seed"] == 3 and config["output_dir"] == str(tmp_path)
    found = [json.loads(line.partition(" ")[2]) for line in result.stdout.splitlines() if line.startswith("values")]
    assert [step for step, _ in found] == [1, 2, 4, 4, 4]
    assert [values.get("train/loss") for _, values in found] == [1, 2, 3.5, None, None]
    assert found[3][1] == {"eval/accuracy": 0.25} and found[4][1]["summary/items_per_s"] > 0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record.get("loss") for record in records] == [1, 2, 3.5, None, None]
    assert records[1]["tokens_per_s"] == pytest.approx(5 * records[1]["items_per_s"])
