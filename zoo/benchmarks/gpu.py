"""What the zoo's full-size models cost on a real GPU, operation by operation, and whether two ranks on it train right.

    python zoo/benchmarks/gpu.py [--out costs] [--seconds 440] [--device cuda] [--models vit-g14 llama2-7b sdxl-unet]
    python zoo/benchmarks/gpu.py --device cpu --tiny --seconds 200       # the same on small members, without a GPU

First two processes train small members as a pipeline over gloo, on the same device, beside one plain process: their
losses must agree. Then every distinct operation of each model is measured in 16 and 32 bits, by the package's own
profiler, and written as a cost file that `pfeife plan --graph` reads, with a table beside them (`table.md`). No weights
are made for that. Each part is a process of its own, ended when its time is up: what it has measured by then counts.
A model whose library is missing is left out with a word. Ignores: links between GPUs, and whole steps of large models.
Fails (exit status 1) where losses differ or nothing could be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_costs import Costs, Left
from rich.console import Console
from rich.table import Table

__all__ = ["Losses", "main"]

HERE = Path(__file__).parent
MODELS = ("vit-g14", "llama2-7b", "sdxl-unet")
TRAINED = ("llama2-7b-tiny", "vit-g14-tiny")
STEPS = 6
TOLERANCE = 2e-4
TRAINING_SHARE, TRAINING_MOST_S = 0.3, 100.0  # of the time, for what trains
GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Of the same steps by one process and by two; empty where it failed, and why."""

    model: str
    plain: tuple[float, ...]
    pipelined: tuple[float, ...]
    problem: str = ""

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        pairs = zip(self.plain, self.pipelined, strict=True)
        return max((abs(a - b) / abs(a) for a, b in pairs), default=float("inf"))

    @property
    def agree(self) -> bool:
        """Whether there are some, and they are the same."""
        return not self.problem and self.worst <= TOLERANCE


def trained(model: str, device: str, limit_s: float) -> Losses:
    """Train a small member by one process, then by two."""
    end_s = time.monotonic() + limit_s
    found = []
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            commands = [[sys.executable, str(HERE / "gpu_rank.py"), model, str(STEPS), str(size)]] * size
            port = str(20_000 + os.getpid() % 20_000 + size)
            environments = [_rank_environment(rank, size, device, port) for rank in range(size)]
            outputs = run(commands, environments, max(1.0, end_s - time.monotonic()), Path(folder))
        lines = [line for line in outputs[0].splitlines() if line.startswith("losses ")]
        if not lines:
            why = outputs[0].strip().splitlines()[-1:] or ["no time left"]
            return Losses(model=model, plain=(), pipelined=(), problem=f"{size} process(es): {why[0]}")
        found.append(tuple(json.loads(lines[-1].removeprefix("losses "))))
    return Losses(model=model, plain=found[0], pipelined=found[1])


def costs_of(options: argparse.Namespace, model: str, limit_s: float, folder: Path) -> list[Costs | Left]:
    """Measure one model, in a process of its own; what it said before its time was up."""
    command = [sys.executable, str(HERE / "gpu_costs.py"), model, "--device", options.device, "--out", str(options.out)]
    command += ["--seconds", str(limit_s - GRACE_S)]
    (output,) = run([command], [dict(os.environ)], limit_s, folder)
    found: list[Costs | Left] = []
    for line in output.splitlines():
        kind, _, text = line.partition(" ")
        if kind in ("costs", "left"):
            found.append((Costs if kind == "costs" else Left)(**json.loads(text)))
    if not found:
        last = output.strip().splitlines()[-1:] or ["its time was up"]
        found.append(Left(model=model, precision="all", why=last[0]))
    return found


def run(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], limit_s: float, folder: Path
) -> list[str]:
    """Run processes side by side, end them when the time is up, and give what they printed."""
    end_s = time.monotonic() + limit_s
    files = [folder / f"{number}.out" for number in range(len(commands))]
    processes = []
    for command, environment, file in zip(commands, environments, files, strict=True):
        with file.open("wb") as out:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True))
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end_s - time.monotonic()))
    finally:  # also where this one is interrupted: they are in sessions of their own
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def _rank_environment(rank: int, size: int, device: str, port: str) -> dict[str, str]:
    found = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        found["ACCELERATE_USE_CPU"] = "true"
    if size == 1:
        return found | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    # Each rank is the only one of its host, as it were: its GPU is the first, which is the same one.
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if device == "cuda" else {"LOCAL_RANK": str(rank)}
    return found | {
        "LOCAL_WORLD_SIZE": str(size),
        **local,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PFEIFE_ENABLED": "true",
        "PFEIFE_NUM_MICROBATCHES": "4",
        "PFEIFE_ON_CAPTURE_FAILURE": "error",
    }


def tables(losses: Sequence[Losses], costs: Sequence[Costs]) -> list[Table]:
    """What a person sees."""
    first = Table("model", "plain, last loss", "two ranks", "largest difference", title="Training")
    for one in losses:
        if one.problem:
            first.add_row(one.model, "-", "-", one.problem)
        else:
            first.add_row(one.model, f"{one.plain[-1]:.5f}", f"{one.pipelined[-1]:.5f}", f"{one.worst:.1e}")
    second = Table(*Costs.columns(), title="One micro-batch")
    for cost in costs:
        second.add_row(*cost.cells())
    return [first, second]


def markdown(found: Sequence[Table], left: Sequence[str]) -> str:
    """The same as a document."""
    lines: list[str] = []
    for table in found:
        heads = [str(column.header) for column in table.columns]
        cells = zip(*(column.cells for column in table.columns), strict=True)
        lines += [f"## {table.title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in cells] + [""]
    return "\n".join([*lines, *(f"- {line}" for line in left), ""])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("costs"), help="folder of the cost files")
    parser.add_argument("--seconds", type=float, default=440.0, help="for everything (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="the small members of the same architectures")
    return parser.parse_args()


def main() -> int:
    """Train, measure, print, write; 1 where something is wrong."""
    options = _arguments()
    end_s = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 160)
    losses = []
    training_s = min(TRAINING_SHARE * options.seconds, TRAINING_MOST_S) / len(TRAINED)
    for model in TRAINED:
        losses.append(trained(model, options.device, training_s))
        console.print(f"{model}: {losses[-1].problem or f'losses differ by at most {losses[-1].worst:.1e}'}")
    costs: list[Costs] = []
    left: list[str] = []
    models = [f"{model}-tiny" if options.tiny else model for model in options.models]
    for number, model in enumerate(models):
        limit_s = (end_s - time.monotonic()) / (len(models) - number)
        with tempfile.TemporaryDirectory() as folder:
            for one in costs_of(options, model, max(limit_s, GRACE_S + 1), Path(folder)):
                if isinstance(one, Costs):
                    costs.append(one)
                else:
                    left.append(f"{one.model} {one.precision}: left out: {one.why}")
        console.print(f"{model}: {sum(cost.model == model for cost in costs)} cost file(s)")
    found = tables(losses, costs)
    for table in found:
        console.print(table)
    for line in left:
        console.print(line, soft_wrap=True, markup=False)
    (options.out / "table.md").write_text(markdown(found, left), encoding="utf-8")
    record = {"losses": [asdict(one) for one in losses], "costs": [asdict(cost) for cost in costs], "left": left}
    (options.out / "table.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    console.print(f"written to {options.out}", soft_wrap=True)
    return int(not costs or not all(one.agree for one in losses))


if __name__ == "__main__":
    raise SystemExit(main())
