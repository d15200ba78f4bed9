"""One rank of a training pipeline fails: all processes end soon, and the first error is printed once, whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.forks import Fork
from tests.launching import environment, free_port
from tests.launching import start as start_process

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

# Nobody may outlive a failure for longer.
LIMIT_S = 10

SETUP = """
import os, signal, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from accelerate import Accelerator

rank = int(os.environ["RANK"])

class Net(nn.Module):
    # The lookup fails on real data only: nothing notices while the model is captured and planned.
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.table = nn.Embedding(10, 32)
        self.last = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x, index):
        return self.last(self.first(x) + self.table(index))

def batch(rows=8, index=1):
    return dict(x=torch.randn(rows, 16), index=torch.full((rows,), index)), torch.randint(3, (rows,))

def step(inputs, targets):
    loss = F.cross_entropy(model(**inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

accelerator = Accelerator()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
"""

READY = """
print(f"ready {rank} {os.getpid()}", flush=True)
time.sleep(0.5)
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int | None
    """Of the launcher, or of the first process; None if something still ran at the limit."""
    codes: list[int | None]
    error: str
    output: str
    wall_s: float
    """From when all ranks were ready."""


def start_ranks(path: Path, num_ranks: int, port: int) -> list[tuple[list[str], dict[str, str]]]:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(num_ranks), "PFEIFE_ENABLED": "true", "ACCELERATE_USE_CPU": "true"}
    return [([sys.executable, str(path)], shared | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(num_ranks)]


def start_launcher(path: Path, num_ranks: int, port: int) -> list[tuple[list[str], dict[str, str]]]:
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_machines": 1}
    config |= {"num_processes": num_ranks, "main_process_port": port, "mixed_precision": "no", "pfeife_config": {}}
    yaml_file = path.with_name("config.yaml")
    yaml_file.write_text(yaml.safe_dump(config))
    return [([sys.executable, "-m", "accelerate.commands.launch", "--config", str(yaml_file), str(path)], {})]


def run(script: str, folder: Path, *, num_ranks: int, start=start_ranks, kill: dict[int, int] | None = None) -> Outcome:
    """Run a script that says when it is ready, send signals to ranks then, and see how long all need to end."""
    path = folder / "script.py"
    path.write_text(SETUP + script)
    out, err = folder / "out", folder / "err"
    processes = []
    pids: dict[int, int] = {}
    try:
        for number, (command, env) in enumerate(start(path, num_ranks, free_port())):
            # Launchers' children end with the session.
            is_launcher = command[1] != str(path)
            processes.append(
                start_process(number, command, environment(env), stdout=out, stderr=err, fresh=is_launcher)
            )
        wait_until(lambda: out.read_text().count("ready ") == num_ranks or not any(map(is_running, processes)), 60)
        found = re.findall(r"ready (\d+) (\d+)", out.read_text())
        assert len(found) == num_ranks, out.read_text() + err.read_text()
        pids = {int(rank): int(pid) for rank, pid in found}
        start_s = time.monotonic()
        for rank, number in (kill or {}).items():
            os.kill(pids[rank], number)
        wait_until(lambda: not any(map(is_running, processes)) and not any(map(exists, pids.values())), 2 * LIMIT_S)
        wall_s = time.monotonic() - start_s
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome = Outcome(code=codes[0], codes=codes, error=err.read_text(), output=out.read_text(), wall_s=wall_s)
    assert wall_s < LIMIT_S, outcome
    assert None not in codes, outcome
    return outcome


def wait_until(is_true, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true() and time.monotonic() < deadline_s:
        time.sleep(0.02)


def is_running(process: subprocess.Popen | Fork) -> bool:
    return process.poll() is None


def exists(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_one_error(outcome: Outcome, rank: int, num_ranks: int, last_line: str) -> None:
    """The failing rank prints a traceback that ends in `last_line`; each other rank one line."""
    error = re.sub(r"^\[rank\d+\]: ", "", outcome.error, flags=re.MULTILINE)
    assert error.count(f"[pfeife rank {rank}/{num_ranks}] failed, stopping all ranks") == 1, outcome.error
    assert error.count("Traceback (most recent call last)") == 1, outcome.error
    assert len(re.findall(rf"^{last_line}", error, re.MULTILINE)) == 1, outcome.error
    assert_others_say_one_line(outcome, rank, num_ranks)


def assert_others_say_one_line(outcome: Outcome, rank: int, num_ranks: int) -> None:
    for other in set(range(num_ranks)) - {rank}:
        lines = [line for line in outcome.error.splitlines() if f"[pfeife rank {other}/{num_ranks}]" in line]
        assert len(lines) == 1, outcome.error
        assert f"stopped because rank {rank} failed" in lines[0], outcome.error


def test_a_small_batch_works_and_an_error_in_the_middle_stage_ends_all(tmp_path):
    # Three ranks: two micro-batches a rank are planned, and four, one and seven rows are fewer.
    script = f"""
for rows in (8, 4, 1, 7):
    print(f"loss {{rank}} {{rows}} {{step(*batch(rows)):.6f}}\\n", end="", flush=True)  # one write: ranks share a pipe
assert model.table.weight.is_meta == (rank != 1), "the lookup is in the middle stage"
{READY}
step(*batch(index=99))
print("not reached")
"""
    outcome = run(script, tmp_path, num_ranks=3, start=with_split_points)
    losses = sorted(re.findall(r"loss \d+ (\d+ [\d.]+)", outcome.output))
    assert len(losses) == 12 and len(set(losses)) == 4, outcome.output
    assert outcome.codes == [1, 1, 1]
    assert "not reached" not in outcome.output
    assert_one_error(outcome, 1, 3, "IndexError: index out of range in self")


def with_split_points(path: Path, num_ranks: int, port: int):
    return [(c, env | {"PFEIFE_SPLIT_POINTS": "table,last"}) for c, env in start_ranks(path, num_ranks, port)]


def test_an_error_under_accelerate_launch_is_printed_once_above_the_launchers(tmp_path):
    # Ranks fail in their backward: the hook is called on the rank that holds the parameter.
    script = f"""
def refuse(gradient):
    if armed:
        raise ArithmeticError("this gradient is refused")
armed = False
model.last[2].weight.register_hook(refuse)
step(*batch())
{READY}
armed = True
step(*batch())
"""
    outcome = run(script, tmp_path, num_ranks=2, start=start_launcher)
    assert outcome.code not in (0, None), outcome
    first = outcome.error.index("ArithmeticError: this gradient is refused")
    assert outcome.error.count("ArithmeticError: this gradient is refused") <= 2  # whole, and in the other's line
    assert "stopped because rank 1 failed: ArithmeticError: this gradient is refused" in outcome.error
    assert first < outcome.error.index("ChildFailedError"), outcome.error


@pytest.mark.parametrize("start", [start_ranks, start_launcher], ids=["ranks", "launch"])
def test_a_rank_killed_in_mid_step_ends_all(tmp_path, start):
    num_ranks = 3 if start is start_ranks else 2
    script = f"""
step(*batch())
{READY}
for _ in range(100000):
    step(*batch())
"""
    outcome = run(script, tmp_path, num_ranks=num_ranks, start=start, kill={1: signal.SIGKILL})
    assert outcome.code not in (0, None), outcome
    for rank in {0, num_ranks - 1} - {1}:
        wanted = f"[pfeife rank {rank}/{num_ranks}] stopped because rank 1 failed: rank 1 ended without a word"
        assert outcome.error.count(wanted) == 1, outcome.error
    own_part = outcome.error.partition("elastic")[0]
    assert "Traceback" not in own_part, outcome.error


def test_an_error_in_the_dataloader_of_one_rank(tmp_path):
    script = f"""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        if armed and rank == 0 and number == 20:
            raise OSError("this sample cannot be read")
        inputs, targets = batch(1)
        return torch.zeros(16), 1, 0
armed = False
loader = accelerator.prepare(torch.utils.data.DataLoader(Data(), batch_size=8))
step(*batch())
{READY}
armed = True
for x, index, targets in loader:
    step(dict(x=x, index=index), targets)
"""
    outcome = run(script, tmp_path, num_ranks=2)
    assert outcome.codes == [1, 1], outcome
    assert_one_error(outcome, 0, 2, "OSError: this sample cannot be read")


def test_an_exit_of_one_rank_ends_all_with_its_code(tmp_path):
    script = f"""
step(*batch())
{READY}
if rank == 0:
    sys.exit(3)
step(*batch())
"""
    outcome = run(script, tmp_path, num_ranks=2)
    assert outcome.codes == [3, 1], outcome
    assert "Traceback" not in outcome.error, outcome.error
    assert "[pfeife rank 0/2] exited with code 3 (" in outcome.error
    assert_others_say_one_line(outcome, 0, 2)


def test_ctrl_c_to_all(tmp_path):
    script = f"""
step(*batch())
{READY}
for _ in range(100000):
    step(*batch())
"""
    outcome = run(script, tmp_path, num_ranks=2, kill={0: signal.SIGINT, 1: signal.SIGINT})
    assert all(code not in (0, None) for code in outcome.codes), outcome
    assert outcome.error.count("Traceback") == 1, outcome.error
    assert outcome.error.rstrip().count("KeyboardInterrupt") <= 2, outcome.error


def test_models_that_cannot_be_pipelined(tmp_path):
    # First one that is not captured, which the script may catch: every rank raises it alike. Then one too small.
    script = f"""
class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, x):
        x = self.layer(x)
        if len(x[x.sum(-1) > 0]) > 3:  # the line to be named
            x = x + 1
        return self.layer(x)

from dataclasses import replace
from pfeife_accelerate import session
session.current().plugin = replace(session.current().plugin, on_capture_failure="error")
branching = accelerator.prepare(Branching())
try:
    branching(torch.randn(8, 16))
except ValueError as error:
    print("refused", rank, str(error).replace(chr(10), " | "), flush=True)
small = accelerator.prepare(nn.Linear(16, 3))
{READY}
small(torch.randn(8, 16))
"""
    outcome = run(script, tmp_path, num_ranks=3)
    refusals = [line for line in outcome.output.splitlines() if line.startswith("refused")]
    assert len(refusals) == 3, outcome
    line_number = next(n for n, line in enumerate((SETUP + script).splitlines(), 1) if "the line to be named" in line)
    for refusal in refusals:
        assert "PF510 Branching cannot be captured" in refusal
        assert f"script.py:{line_number}" in refusal, refusal
    assert outcome.codes == [1, 1, 1]
    assert outcome.error.count("Traceback (most recent call last)") == 1, outcome.error
    errors = re.findall(r"^(?:\[rank\d\]: )?\S*PfeifeError: (.*)$", outcome.error, re.MULTILINE)
    assert errors == ["PF301 the model cannot be cut into 3 stages"], outcome.error


def test_an_unknown_option_is_refused_before_any_process_starts(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print('started')")
    command, _ = start_launcher(path, 2, free_port())[0]
    yaml_file = tmp_path / "config.yaml"
    yaml_file.write_text(yaml_file.read_text().replace("pfeife_config: {}", "pfeife_config: {num_microbatch: 4}"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert "num_microbatch" in done.stderr and "num_microbatches" in done.stderr
    assert "Traceback" not in done.stderr
