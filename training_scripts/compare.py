"""Run one training script under several Accelerate configurations, and compare speed, memory and loss.

    python training_scripts/compare.py training_scripts/train_vit.py --configs plain_cpu ddp_cpu2 pfeife_cpu2 \\
        -- --max_train_steps 20
    python training_scripts/compare.py training_scripts/train_llama.py --repeats 3 --out outputs/llama2_7b \\
        --configs ddp_gpu8_fp16 fsdp2_gpu8_fp16 zero2_gpu8_fp16 zero3_gpu8_fp16 pfeife_gpu8_fp16 -- --model llama2-7b

What follows `--` goes to the script. Every run takes the same items in the same order, since `--train_batch_size`
counts the items of a step over all processes. The others are compared with the first configuration that runs. With
--repeats the configurations take turns, and medians are quoted. One that cannot run here is listed with the reason.
Ignores: several hosts.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

CONFIGS = Path(__file__).resolve().parent / "configs"
ENDING_S = 60.0
"""A launcher gives its processes 30 seconds to end by themselves before it ends them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: what a configuration reached, or why it did not run."""

    config: str
    num_processes: int
    status: str
    items_per_s: float | None = None
    relative_speed: float | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    last_loss: float | None = None
    loss_difference: float | None = None


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--configs", nargs="+", required=True, help="yaml files, or names of those in configs/")
    parser.add_argument("--repeats", type=positive(int), default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"), help="folder of the table and the runs")
    parser.add_argument("--timeout", type=positive(float), help="seconds after which a run is ended")
    own, script_args = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, script_args = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    args.configs = [config_file(parser, name) for name in args.configs]
    stems = [path.stem for path in args.configs]
    if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
        parser.error(f"--configs: {', '.join(twice)} twice; --repeats runs all of them several times")
    if not args.script.is_file():
        parser.error(f"{args.script}: no such file")
    return args, script_args


def positive(number):
    """An argument: a number, of the type `number`, above 0."""

    def read(text):
        value = number(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    read.__name__ = number.__name__  # argparse names it where the text is no number
    return read


def read_config(path):
    """The options of a configuration file, or an end with a word."""
    try:
        options = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise SystemExit(f"{path} is not YAML: {error}") from None
    needed = ("distributed_type", "num_processes")
    if not isinstance(options, dict) or any(name not in options for name in needed):
        raise SystemExit(f"{path} is no configuration of Accelerate: it does not say {' and '.join(needed)}")
    return options


def config_file(parser, name):
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    parser.error(
        f"--configs {name}: no such file, and not one of {', '.join(sorted(p.stem for p in CONFIGS.glob('*.yaml')))}"
    )


# -- running -----------------------------------------------------------------------------------------------------------


def is_for_cpu(path, options):
    return bool(options.get("use_cpu")) or "_cpu" in path.stem


def missing(path, options):
    """Why this configuration cannot run on this machine, or None."""
    if "pfeife_config" in options and importlib.util.find_spec("pfeife_accelerate") is None:
        return "pfeife_accelerate is not installed"
    if options["distributed_type"] == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if not is_for_cpu(path, options):
        import torch

        if torch.cuda.device_count() < options["num_processes"]:
            return f"needs {options['num_processes']} CUDA devices, there are {torch.cuda.device_count()}"
    return None


def run(path, options, script, script_args, folder, timeout):
    """Launch the script; "ok", or how it failed. What it prints is in log.txt."""
    # Of an earlier comparison: its checkpoints would make the script refuse to begin anew.
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    command += ["--main_process_port", str(free_port()), str(script), *script_args, "--output_dir", str(folder)]
    env = dict(os.environ)
    if is_for_cpu(path, options):
        env["ACCELERATE_USE_CPU"] = "true"
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout:g} s"
        finally:
            if process.poll() is None:
                end(process)
    if code == 0:
        return "ok" if (folder / "metrics.jsonl").is_file() else f"failed, it wrote no {folder / 'metrics.jsonl'}"
    return "out of memory" if "out of memory" in log.read_text(errors="replace").lower() else f"failed, see {log}"


def end(process):
    """End a launcher and the processes that it started."""
    # These are in sessions of their own, where only the launcher finds them: it ends them when it is asked to end.
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- comparing ---------------------------------------------------------------------------------------------------------


def read_run(folder):
    """(losses by step, summary) of a finished run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "step"}
    return losses, next(record for record in records if record["kind"] == "summary")


def largest_difference(losses, reference):
    """Of two loss curves, relative to the first one's values."""
    steps = losses.keys() & reference.keys()
    return max((abs(losses[step] - reference[step]) / abs(reference[step]) for step in steps), default=None)


def median(values):
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def make_row(path, options, statuses, runs, first_runs):
    bad = next((status for status in statuses if status != "ok"), None)
    row = {"config": path.stem, "num_processes": options["num_processes"], "status": bad or "ok"}
    if bad:
        return Row(**row)
    losses, summaries = [losses for losses, _ in runs], [summary for _, summary in runs]
    speed = median(summary.get("items_per_s") for summary in summaries)
    first_speed = median(summary.get("items_per_s") for _, summary in first_runs) if first_runs else None
    return Row(
        **row,
        items_per_s=speed,
        relative_speed=speed / first_speed if speed and first_speed else None,
        tokens_per_s=median(summary.get("tokens_per_s") for summary in summaries),
        peak_memory_bytes=int(median(max(summary["peak_memory_bytes"]) for summary in summaries)),
        last_loss=losses[-1][max(losses[-1])],
        loss_difference=largest_difference(losses[-1], first_runs[-1][0]) if first_runs else None,
    )


def markdown(rows):
    columns = ["configuration", "processes", "items/s", "to the first", "tokens/s", "peak memory of the worst process"]
    columns += ["last loss", "loss curve differs by at most"]
    lines = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    for row in rows:
        if row.status != "ok":
            lines.append(f"| {row.config} | {row.num_processes} | {row.status} | | | | | |")
            continue
        cells = [
            number(row.items_per_s, "{:.1f}"),
            number(row.relative_speed, "{:.2f}x"),
            number(row.tokens_per_s, "{:.0f}"),
            number(row.peak_memory_bytes / 2**30, "{:.2f} GiB"),
            number(row.last_loss, "{:.4f}"),
            number(row.loss_difference, "{:.1e}"),
        ]
        lines.append(f"| {row.config} | {row.num_processes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def number(value, form):
    return "" if value is None else form.format(value)


def main():
    args, script_args = parse_args()
    options = {path: read_config(path) for path in args.configs}
    statuses, runs = defaultdict(list), defaultdict(list)
    for path in args.configs:
        if reason := missing(path, options[path]):
            statuses[path] = [reason]
    for repeat in range(args.repeats):
        for path in args.configs:
            if any(status != "ok" for status in statuses[path]):
                continue
            folder = args.out / "runs" / path.stem / str(repeat)
            print(f"{path.stem}, run {repeat + 1} of {args.repeats} ...", flush=True)
            status = run(path, options[path], args.script, script_args, folder, args.timeout)
            statuses[path].append(status)
            if status == "ok":
                runs[path].append(read_run(folder))
    first = next((runs[path] for path in args.configs if runs[path]), None)
    rows = [make_row(path, options[path], statuses[path], runs[path], first) for path in args.configs]
    args.out.mkdir(parents=True, exist_ok=True)
    command = f"python {' '.join(sys.argv)}"
    report = {"command": command, "repeats": args.repeats, "rows": [asdict(row) for row in rows]}
    (args.out / "compare.json").write_text(json.dumps(report, indent=2) + "\n")
    (args.out / "compare.md").write_text(f"`{command}`\n\n{markdown(rows)}")
    print(f"\n{markdown(rows)}\nwritten to {args.out}")
    if any(row.status.startswith(("failed", "took")) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
