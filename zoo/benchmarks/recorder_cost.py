"""What recording costs: steps of a training on two ranks, every second one recorded.

Models: the time inside the executor, and the processor time of the process meanwhile, medians of both.
Ignores: reading clocks and writing the file, which lie between steps.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from torch import nn

from pfeife_accelerate.runtime.executor import Executor
from pfeife_accelerate.runtime.recorder import Recorder
from pfeife_accelerate.runtime.step import RankProgram, StepInputs, StepState

__all__ = ["Cost", "measure"]

ROWS, WIDTH, LAYERS, STEPS, WARM_UP = 64, 512, 12, 240, 10


class Cost:
    """Seconds of a step, without and with the recorder: by the clock and of the processor, on the busier rank."""

    def __init__(self, line: str) -> None:
        """Read what `train` has printed."""
        self.wall_s, self.recorded_wall_s, self.cpu_s, self.recorded_cpu_s = map(float, line.split()[1:])

    @property
    def wall(self) -> float:
        """The part that recording adds to a step."""
        return self.recorded_wall_s / self.wall_s - 1

    @property
    def cpu(self) -> float:
        """The part that it adds to the processor's work."""
        return self.recorded_cpu_s / self.cpu_s - 1


class _Alternating:
    """`Executor.run` with the recorder in every second step."""

    def __init__(self) -> None:
        self.run = Executor.run
        self.recorder: Recorder | None = None
        self.wall_s: dict[bool, list[float]] = {False: [], True: []}
        self.cpu_s: dict[bool, list[float]] = {False: [], True: []}
        self.number = 0

    def __call__(self, executor: Executor, program: RankProgram, inputs: StepInputs, state: StepState) -> None:
        is_recorded = self.number % 2 == 1
        self.number += 1
        if self.recorder is None:
            self.recorder = Recorder(executor.transport, executor.device)
        self.recorder.begin()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        self.run(executor, program, inputs, state, self.recorder if is_recorded else None)
        if self.number > WARM_UP:
            self.wall_s[is_recorded].append(time.perf_counter() - start_s)
            self.cpu_s[is_recorded].append(time.process_time() - start_cpu_s)


def train() -> None:
    """One rank: prints its medians."""
    alternating = _Alternating()
    Executor.run = lambda *arguments: alternating(*arguments)  # type: ignore[method-assign]
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(STEPS):
        accelerator.backward(model(torch.randn(ROWS * 4, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = (alternating.wall_s[False], alternating.wall_s[True], alternating.cpu_s[False], alternating.cpu_s[True])
    sys.stdout.write("medians " + " ".join(str(statistics.median(seconds)) for seconds in found) + "\n")
    sys.stdout.flush()


def measure() -> Cost:
    """Run this file on two ranks."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "num_machines": 1,
        "num_processes": 2,
        "mixed_precision": "no",
        "pfeife_config": {"num_microbatches": 4, "schedule": "1f1b"},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pfeife.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(file), __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if line.startswith("medians")]
    return max(map(Cost, lines), key=lambda cost: cost.cpu_s)


if __name__ == "__main__":
    train()
