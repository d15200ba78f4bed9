"""The examples as pipelines: what each trains, evaluates and saves is what it does in one plain process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.launching import free_port, run_command

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_LLAMA = ("--hidden_size=64", "--num_layers=3", "--seq_len=64", "--batch_size=6", "--steps=6", "--eval_samples=10")


def run_example(script: str, folder: Path, *arguments: str, pipelined: bool) -> list[dict]:
    folder.mkdir()
    log_json = folder / "log.json"
    command = [sys.executable]
    if pipelined:
        config = folder / "pfeife.yaml"
        options = yaml.safe_load((EXAMPLES / "pfeife.yaml").read_text())
        config.write_text(yaml.safe_dump({**options, "main_process_port": free_port()}))
        command += ["-m", "accelerate.commands.launch", "--config", str(config)]
    command += [str(EXAMPLES / script), f"--output_dir={folder / 'out'}", f"--log_json={log_json}", *arguments]
    run_command(command, env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH")}, timeout=150).check()
    return [json.loads(line) for line in log_json.read_text().splitlines()]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("finetune_llama.py", (*SMALL_LLAMA, "--gradient_accumulation_steps=2", "--tie_embeddings")),
        ("train_vit_digits.py", ("--hidden_size=64", "--num_layers=3", "--batch_size=30", "--steps=8")),
        ("finetune_trainer.py", (*SMALL_LLAMA, "--gradient_accumulation_steps=2")),
    ],
)
def test_an_example_trains_evaluates_and_saves_as_in_one_process(tmp_path, script, arguments):
    plain = run_example(script, tmp_path / "plain", *arguments, pipelined=False)
    pipelined = run_example(script, tmp_path / "pipelined", *arguments, pipelined=True)
    assert len(pipelined) == len(plain)
    compared = 0
    for found, wanted in zip(pipelined, plain, strict=True):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            if "per_s" in key or "runtime" in key:
                continue
            compared += "loss" in key or "accuracy" in key
            close = pytest.approx(value, rel=1e-5, abs=1e-9) if isinstance(value, float) else value
            assert found[key] == close, (key, found, wanted)
    assert compared > 6
