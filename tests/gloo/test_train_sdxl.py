"""`training_scripts/train_sdxl.py` as a pipeline: the same losses, averaged weights and pictures as in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "training_scripts" / "train_sdxl.py"
#: Of the tiny member of the zoo: two resolutions instead of three, a quarter of the channels.
SMALLER = dict(
    down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
    up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
    block_out_channels=[8, 16],
    attention_head_dim=[1, 2],
    transformer_layers_per_block=[1, 1],
    cross_attention_dim=32,
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=64,
    norm_num_groups=4,
    sample_size=8,
)
SHORT = (
    "--max_train_steps=6", "--lr_warmup_steps=2", "--train_batch_size=8", "--max_train_samples=24",
    "--max_eval_samples=6", "--eval_batch_size=4", "--ema_decay=0.7",
)  # fmt: skip
ON_THE_FLY = (
    "--snr_gamma=5", "--noise_offset=0.1", "--proportion_empty_prompts=0.3", "--random_crop", "--random_flip",
    "--validation_steps=6", "--num_inference_steps=2",
)  # fmt: skip
SAVED = ("--checkpointing_steps=2", "--checkpoints_total_limit=2")
CACHED = (
    "--cache_latents", "--prediction_type=v_prediction", "--gradient_checkpointing", "--gradient_accumulation_steps=2",
    "--foreach_ema", "--proportion_empty_prompts=0.3", "--eval_steps=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((ROOT / "zoo/configs/sdxl-unet-tiny/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SMALLER}))
    return folder


def train(model: Path, folder: Path, arguments: Sequence[str], *, num_ranks: int) -> Path:
    """Run the script, plain on one rank and as a pipeline on more."""
    # With an order of its own, the planner has less to search.
    pipeline = {"PFEIFE_SCHEDULE": "1f1b", "PFEIFE_NUM_MICROBATCHES": "4"} if num_ranks > 1 else {}
    run_ranks(
        SCRIPT,
        num_processes=num_ranks,
        args=[f"--model={model}", f"--output_dir={folder}", *SHORT, *arguments],
        env={"ACCELERATE_USE_CPU": "true", **pipeline},
        timeout=150,
    ).check()
    return folder


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(model, tmp_path_factory.mktemp("plain"), ON_THE_FLY, num_ranks=1)


@pytest.fixture(scope="module")
def pipelined(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(model, tmp_path_factory.mktemp("pipelined"), [*ON_THE_FLY, *SAVED], num_ranks=2)


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def check_same_run(found: Path, wanted: Path, *, steps: range) -> None:
    for kind in ("step", "eval"):
        of_found, of_wanted = ([r for r in records(f, kind) if r["step"] in steps] for f in (found, wanted))
        assert len(of_found) == len(of_wanted) > 0
        for one, other in zip(of_found, of_wanted, strict=True):
            for key in {"step", "loss", "lr", "grad_norm", "num_items"} & other.keys():
                assert one[key] == pytest.approx(other[key], rel=1e-4), (kind, key, one, other)
    assert [r["step"] for r in records(found, "step") if r["step"] in steps] == list(steps)
    weights, other_weights = (load_file(f / "unet/diffusion_pytorch_model.safetensors") for f in (found, wanted))
    assert weights.keys() == other_weights.keys()
    difference = torch.stack([(weights[name] - other).norm() for name, other in other_weights.items()]).norm()
    assert difference <= 1e-4 * torch.stack([other.norm() for other in other_weights.values()]).norm()


def test_two_ranks_train_evaluate_and_average_as_one_process(plain, pipelined):
    check_same_run(pipelined, plain, steps=range(1, 7))
    names = [path.name for path in sorted((plain / "pictures").iterdir())]
    assert names == [f"step_000006_{number}.png" for number in range(4)]
    for name in names:
        found, wanted = (np.asarray(Image.open(f / "pictures" / name), dtype=float) for f in (pipelined, plain))
        assert wanted.std() > 0 and np.abs(found - wanted).max() <= 1
    assert sorted(path.name for path in (pipelined / "checkpoints").iterdir()) == ["checkpoint_4", "checkpoint_6"]


@pytest.mark.slow
def test_three_ranks_with_cached_latents_checkpointing_and_accumulation_as_one_process(model, tmp_path):
    wanted = train(model, tmp_path / "plain", CACHED, num_ranks=1)
    check_same_run(train(model, tmp_path / "pipelined", CACHED, num_ranks=3), wanted, steps=range(1, 7))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pipelines_checkpoint_goes_on_with_the_same_losses_and_averages(model, pipelined, tmp_path, num_ranks):
    checkpoint = f"--resume_from_checkpoint={pipelined / 'checkpoints' / 'checkpoint_4'}"
    resumed = train(model, tmp_path / "resumed", [*ON_THE_FLY, checkpoint], num_ranks=num_ranks)
    check_same_run(resumed, pipelined, steps=range(5, 7))
    if num_ranks == 2:  # the same ranks, the same sums
        losses = [[r["loss"] for r in records(folder, "step") if r["step"] > 4] for folder in (resumed, pipelined)]
        assert losses[0] == losses[1]


def test_the_latest_checkpoint_is_resumed_and_the_log_goes_on(model, tmp_path):
    short = [*ON_THE_FLY, *SAVED, "--max_train_steps=3", "--lr_scheduler=constant"]
    train(model, tmp_path, short, num_ranks=1)
    third = records(tmp_path, "step")[2]
    train(model, tmp_path, [*short, "--max_train_steps=4", "--resume_from_checkpoint=latest"], num_ranks=1)
    steps = records(tmp_path, "step")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[2]["loss"] == third["loss"]
