"""The training scripts as pipelines: the losses of one plain process, and checkpoints that either can go on from."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.launching import run_command, run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "training_scripts"
# An epoch has 6 steps: step 4 is in the middle of the first epoch, step 7 in the second one.
ARGUMENTS = ("--max_train_steps=8", "--lr_warmup_steps=2", "--checkpointing_steps=4", "--eval_batch_size=6")
OWN_ARGUMENTS = {
    "train_vit.py": ("--train_batch_size=12", "--max_train_samples=75", "--eval_steps=4", "--max_eval_samples=10"),
    "train_llama.py": (
        "--train_batch_size=8", "--max_train_samples=50", "--block_size=32", "--gradient_accumulation_steps=2",
        "--max_eval_samples=6",
    ),
}  # fmt: skip


def small_model(script: str, folder: Path) -> str:
    """A folder with the configuration of the script's default model, which is small, with three of its layers."""
    name = {"train_vit.py": "vit-g14-tiny", "train_llama.py": "llama2-7b-tiny"}[script]
    config = json.loads((ROOT / "zoo" / "configs" / name / "config.json").read_text())
    if "model_args" in config:
        config["model_args"]["depth"] = 3
    else:
        config["num_hidden_layers"] = 3
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "config.json").write_text(json.dumps(config))
    return str(folder / "config")


def train(script: str, folder: Path, *arguments: str, num_ranks: int) -> list[dict]:
    """The records of metrics.jsonl of a run on `num_ranks` ranks, or of a plain process if that is 1."""
    args = [f"--model={small_model(script, folder)}", f"--output_dir={folder}"]
    args += [*ARGUMENTS, *OWN_ARGUMENTS[script], *arguments]
    if num_ranks == 1:
        run_command([sys.executable, str(FOLDER / script), *args], timeout=150, fresh=False).check()
    else:
        # A number of micro-batches that does not divide the batch. Left to the planner, order and number are so below.
        env = {"PFEIFE_NUM_MICROBATCHES": "5", "PFEIFE_SCHEDULE": "1f1b"}
        run_ranks(FOLDER / script, num_processes=num_ranks, args=args, env=env, timeout=200).check()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by script and number of ranks: (folder, records), made when they are first asked for."""
    made: dict[tuple[str, int], tuple[Path, list[dict]]] = {}

    def run(script: str, num_ranks: int) -> tuple[Path, list[dict]]:
        if (script, num_ranks) not in made:
            folder = tmp_path_factory.mktemp(f"{Path(script).stem}_{num_ranks}")
            # On three ranks activations are computed twice, which changes no value.
            options = ["--gradient_checkpointing"] if num_ranks == 3 else []
            made[script, num_ranks] = (folder, train(script, folder, *options, num_ranks=num_ranks))
        return made[script, num_ranks]

    return run


def check_equal(found: list[dict], wanted: list[dict], *, relative: float = 1e-4) -> None:
    assert [(r["kind"], r.get("step")) for r in found] == [(r["kind"], r.get("step")) for r in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            if "per_s" in key or "memory" in key:
                continue
            close = pytest.approx(value, rel=relative, abs=1e-9) if isinstance(value, float) else value
            assert one[key] == close, (key, one, other)


@pytest.mark.parametrize(
    ("script", "num_ranks"),
    [
        ("train_vit.py", 2),
        ("train_llama.py", 3),
        pytest.param("train_vit.py", 3, marks=pytest.mark.slow),
        pytest.param("train_llama.py", 2, marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_records_the_losses_of_one_process(script, num_ranks, runs):
    folder, found = runs(script, num_ranks)
    plain_folder, wanted = runs(script, 1)
    kinds = [record["kind"] for record in wanted]
    num_evaluations, num_items = {"train_vit.py": (2, 10), "train_llama.py": (1, 6)}[script]
    assert (kinds.count("step"), kinds.count("eval"), kinds[-1]) == (8, num_evaluations, "summary")
    assert {record["num_items"] for record in wanted if record["kind"] == "eval"} == {num_items}
    check_equal(found, wanted)
    summary = found[-1]
    assert summary["items_per_s"] > 0 and summary["tokens_per_s"] > summary["items_per_s"]
    assert len(summary["peak_memory_bytes"]) == num_ranks and min(summary["peak_memory_bytes"]) > 2**27
    for path in (folder, plain_folder):
        assert {saved.name for saved in (path / "checkpoints").iterdir()} == {"checkpoint_4", "checkpoint_8"}
    assert {p.name for p in (folder / "model").iterdir()} == {p.name for p in (plain_folder / "model").iterdir()}


@pytest.mark.parametrize(
    ("script", "saved_by", "resumed_by"),
    [
        ("train_vit.py", 1, 2),
        ("train_llama.py", 3, 1),
        pytest.param("train_vit.py", 3, 1, marks=pytest.mark.slow),
        pytest.param("train_llama.py", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_the_losses_of_the_one_that_went_on(script, saved_by, resumed_by, runs, tmp_path):
    folder, records = runs(script, saved_by)
    checkpoint = f"--resume_from_checkpoint={folder / 'checkpoints' / 'checkpoint_4'}"
    resumed = train(script, tmp_path, checkpoint, num_ranks=resumed_by)
    wanted = [record for record in records if record.get("step", 8) > 4]
    check_equal([*resumed[:-1], {**resumed[-1], "steps": 8}], wanted)
    assert resumed[-1]["steps"] == 4


def test_an_interrupted_pipeline_goes_on_in_its_own_folder(runs, tmp_path):
    folder, records = runs("train_vit.py", 2)
    shutil.copytree(folder, tmp_path / "run")
    # As if it had been ended in step 7.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint_8")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:7]))
    limit = ("--resume_from_checkpoint=latest", "--checkpoints_total_limit=1")
    found = train("train_vit.py", tmp_path / "run", *limit, num_ranks=2)
    check_equal([*found[:-1], {**found[-1], "steps": 8}], records, relative=1e-6)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint_8"]


@pytest.mark.parametrize(
    "on_cpu",
    [
        ["plain_cpu", "pfeife_cpu2"],
        pytest.param(["plain_cpu", "ddp_cpu2", "pfeife_cpu2", "pfeife_cpu3"], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_one_loop_compares_the_configurations_and_says_which_cannot_run_here(on_cpu, tmp_path):
    names = sorted(path.stem for path in (FOLDER / "configs").glob("*.yaml"))
    others = [name for name in names if not name.endswith(("_cpu", "_cpu2", "_cpu3"))]
    command = [sys.executable, str(FOLDER / "compare.py"), str(FOLDER / "train_vit.py"), "--out", str(tmp_path)]
    command += ["--configs", *on_cpu, *others, "--", "--max_train_steps=4", "--max_eval_samples=4"]
    command += ["--train_batch_size=4", "--lr_warmup_steps=1", f"--model={small_model('train_vit.py', tmp_path)}"]
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.environ.get("PYTHONPATH")}
    result = run_command(command, env=env, timeout=280).check()
    rows = {row["config"]: row for row in json.loads((tmp_path / "compare.json").read_text())["rows"]}
    assert list(rows) == [*on_cpu, *others] and len(others) == 30
    for name in on_cpu:
        row = rows[name]
        assert row["status"] == "ok" and row["items_per_s"] > 0 and row["peak_memory_bytes"] > 2**27, row
        assert row["loss_difference"] < 1e-5 and row["last_loss"] == pytest.approx(rows["plain_cpu"]["last_loss"])
        assert f"| {name} | {row['num_processes']} | " in result.stdout
    assert rows["plain_cpu"]["relative_speed"] == 1
    for name in others:
        size = rows[name]["num_processes"]
        reasons = (f"needs {size} CUDA devices, there are 0", "deepspeed is not installed")
        assert rows[name]["status"] in reasons and rows[name]["status"] in result.stdout
    assert (tmp_path / "compare.md").read_text().count("\n| ") == 1 + len(rows)
