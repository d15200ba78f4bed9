"""The examples are ordinary scripts: each trains, evaluates and saves in one process without this package's help.

The pipelined runs of the same scripts are compared with these elsewhere.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_LLAMA = ("--hidden_size=64", "--num_layers=2", "--seq_len=64", "--batch_size=4", "--steps=12")

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


def run_example(script, tmp_path, *arguments):
    """Run a script in a fresh process and return the records it wrote."""
    log_json = tmp_path / "log.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PFEIFE_", "ACCELERATE_"))}
    completed = subprocess.run(
        [sys.executable, EXAMPLES / script, f"--output_dir={tmp_path / 'out'}", f"--log_json={log_json}", *arguments],
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return [json.loads(line) for line in log_json.read_text().splitlines()]


def mean(values):
    return sum(values) / len(values)


def assert_falls(losses):
    assert mean(losses[-3:]) < mean(losses[:3]) - 0.2, losses


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
def test_llama_learns_and_its_checkpoint_gives_the_same_evaluation_loss(tmp_path, tie_embeddings):
    arguments = ("--tie_embeddings",) if tie_embeddings else ()
    *steps, evaluation = run_example("finetune_llama.py", tmp_path, *SMALL_LLAMA, "--eval_samples=6", *arguments)
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert_falls([record["loss"] for record in steps])
    assert evaluation["num_samples"] == 6
    assert evaluation["reloaded_loss"] == pytest.approx(evaluation["loss"], rel=1e-6)


def test_llama_counts_an_accumulated_step_once(tmp_path):
    arguments = (*SMALL_LLAMA, "--steps=3", "--gradient_accumulation_steps=2", "--eval_samples=4")
    *steps, _ = run_example("finetune_llama.py", tmp_path, *arguments)
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert steps[-1]["learning_rate"] == 0.0


def test_vit_learns_and_its_checkpoint_gives_the_same_accuracy(tmp_path):
    arguments = ("--hidden_size=64", "--num_layers=2", "--batch_size=32", "--steps=40")
    *steps, evaluation = run_example("train_vit_digits.py", tmp_path, *arguments)
    assert_falls([record["loss"] for record in steps])
    assert evaluation["num_samples"] == 360
    assert evaluation["accuracy"] > 0.5
    assert evaluation["reloaded_accuracy"] == evaluation["accuracy"]


def test_trainer_learns_and_its_checkpoint_gives_the_same_evaluation_loss(tmp_path):
    *history, reloaded = run_example("finetune_trainer.py", tmp_path, *SMALL_LLAMA, "--eval_samples=8")
    assert_falls([record["loss"] for record in history if "loss" in record])
    eval_losses = [record["eval_loss"] for record in history if "eval_loss" in record]
    assert reloaded["reloaded_eval_loss"] == pytest.approx(eval_losses[-1], rel=1e-5)
