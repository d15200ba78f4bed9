"""One rank of three fails: all processes end soon, and the first error is printed once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launching import environment, free_port, start

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(90)]

SETUP = """
import os, signal, sys, time
import torch, torch.distributed as dist
from pfeife_accelerate.runtime import failure
from pfeife_accelerate.runtime.remote import ControlPlane
from pfeife_accelerate.runtime.transport import DistributedTransport
rank, num_ranks, port = int(sys.argv[1]), 3, int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
plane = ControlPlane.start(rank, num_ranks, store, "127.0.0.1", "test")
guard = failure.install(plane, rank, num_ranks, stop_after_s=2.0)
cpu = torch.device("cpu")
transport = DistributedTransport(dist.group.WORLD, cpu)
guard.watch(lambda: transport.waiting_for)

def receive(peer, tag=0):
    return transport.post_receive((4,), torch.float32, cpu, peer, tag).wait()

dist.barrier()
print(f"ready {rank}", flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    codes: list[int | None]
    errors: list[str]
    outputs: list[str]
    wall_s: float

    @property
    def text(self) -> str:
        return "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(self.errors))


def run(script: str, folder: Path, *, kill: int | None = None, limit_s: float = 10) -> Outcome:
    """Run the script on three ranks; the time counts from when all are connected. Kills what is left."""
    path = folder / "script.py"
    path.write_text(SETUP + script)
    port = free_port()
    files = [((folder / f"{rank}.out"), (folder / f"{rank}.err")) for rank in range(3)]
    processes = []
    try:
        for rank, (out, err) in enumerate(files):
            command = [sys.executable, str(path), str(rank), str(port)]
            processes.append(start(rank, command, environment(), stdout=out, stderr=err, fresh=False))
        wait_until(lambda: all("ready" in out.read_text() for out, _ in files), 40)
        start_s = time.monotonic()
        if kill is not None:
            time.sleep(0.5)
            os.kill(processes[kill].pid, signal.SIGKILL)
        wait_until(lambda: all(process.poll() is not None for process in processes), limit_s)
        wall_s = time.monotonic() - start_s
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    errors = [err.read_text() for _, err in files]
    return Outcome(codes=codes, errors=errors, outputs=[out.read_text() for out, _ in files], wall_s=wall_s)


def wait_until(is_true, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true() and time.monotonic() < deadline_s:
        time.sleep(0.02)


def assert_stopped(outcome: Outcome, rank: int, line: str) -> None:
    """The rank ended with code 1 and one line: that it was stopped, by whom, and why."""
    assert outcome.codes[rank] == 1, outcome.text
    assert outcome.errors[rank] == f"[pfeife rank {rank}/3] stopped because {line}\n", outcome.text


def test_an_exception_in_the_middle_rank_is_printed_once_and_ends_all(tmp_path):
    script = """
if rank == 1:
    time.sleep(0.3)
    raise ValueError("the model is wrong" + chr(10) + "and more")
receive(peer=1)
"""
    outcome = run(script, tmp_path)
    assert outcome.codes[1] == 1, outcome.text
    # torch's own hook, which the guard calls, prefixes the lines of a traceback with the rank.
    error = outcome.errors[1].replace("[rank1]: ", "")
    assert error.startswith("[pfeife rank 1/3] failed, stopping all ranks\nTraceback (most recent call last)")
    assert error.endswith("ValueError: the model is wrong\nand more\n")
    assert outcome.text.count("Traceback") == 1 and outcome.text.count("and more\n") == 1
    for rank in (0, 2):
        assert_stopped(outcome, rank, "rank 1 failed: ValueError: the model is wrong")


def test_a_killed_rank_ends_all_wherever_they_are(tmp_path):
    # Rank 0 waits for a message, rank 1 for a tensor of the rank that is killed.
    script = """
if rank == 0:
    plane.receive("never")
if rank == 1:
    receive(peer=2)
time.sleep(60)
"""
    outcome = run(script, tmp_path, kill=2)
    assert outcome.codes[2] == -signal.SIGKILL
    for rank in (0, 1):
        assert_stopped(outcome, rank, "rank 2 failed: rank 2 ended without a word (killed?)")
    assert outcome.wall_s < 5


def test_the_rank_that_holds_the_store_may_be_the_one_killed(tmp_path):
    script = """
if rank == 0:
    time.sleep(60)
receive(peer=0)
"""
    outcome = run(script, tmp_path, kill=0)
    for rank in (1, 2):
        assert_stopped(outcome, rank, "rank 0 failed: rank 0 ended without a word (killed?)")


def test_a_rank_that_sleeps_or_swallows_errors_is_ended_too(tmp_path):
    script = """
if rank == 0:
    raise RuntimeError("boom")
if rank == 1:
    print("before the sleep")
    time.sleep(60)
while True:
    try:
        receive(peer=0)
    except Exception:
        time.sleep(0.01)
"""
    outcome = run(script, tmp_path)
    assert "RuntimeError: boom" in outcome.errors[0]
    assert "before the sleep" in outcome.outputs[1]
    for rank in (1, 2):
        assert_stopped(outcome, rank, "rank 0 failed: RuntimeError: boom")


def test_the_same_error_on_all_ranks_at_once_is_printed_by_one(tmp_path):
    outcome = run('raise TypeError("same on all")', tmp_path)
    assert outcome.codes == [1, 1, 1], outcome.text
    assert outcome.text.count("Traceback") == 1, outcome.text
    assert outcome.text.count("failed, stopping all ranks") == 1, outcome.text
    assert len(re.findall(r"stopped because rank \d failed: TypeError: same on all\n", outcome.text)) == 2, outcome.text


def test_a_following_error_that_nobody_explains_is_printed_itself(tmp_path):
    script = """
from pfeife_accelerate.errors import PfeifeError
if rank == 1:
    raise PfeifeError(id="PF402", what="waited too long for rank 2")
time.sleep(60)
"""
    outcome = run(script, tmp_path)
    assert "PF402 waited too long for rank 2" in outcome.errors[1]
    assert_stopped(outcome, 0, "rank 1 failed: pfeife_accelerate.errors.PfeifeError: PF402 waited too long for rank 2")


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("sys.exit('no such file')", 1, "exited: no such file"),
    ],
)
def test_a_nonzero_exit_ends_all_and_keeps_its_code(tmp_path, statement, code, text):
    script = f"""
if rank == 1:
    {statement}
receive(peer=1)
"""
    outcome = run(script, tmp_path)
    assert outcome.codes[1] == code, outcome.text
    assert f"[pfeife rank 1/3] {text} (" in outcome.errors[1]
    for rank in (0, 2):
        assert outcome.codes[rank] == 1
        assert outcome.errors[rank].startswith(
            f"[pfeife rank {rank}/3] stopped because rank 1 failed: SystemExit: {text}"
        )
        assert outcome.errors[rank].count("\n") == 1, outcome.text


def test_a_caught_exit_and_a_zero_exit_are_no_failure(tmp_path):
    script = """
try:
    sys.exit(3)
except SystemExit as error:
    assert error.code == 3
time.sleep(0.3 * rank)
sys.exit(0)
"""
    outcome = run(script, tmp_path)
    assert outcome.codes == [0, 0, 0], outcome.text
    assert outcome.errors == ["", "", ""], outcome.text


def test_ctrl_c_is_a_failure(tmp_path):
    script = """
if rank == 2:
    signal.raise_signal(signal.SIGINT)
receive(peer=2)
"""
    outcome = run(script, tmp_path)
    assert outcome.errors[2].rstrip().endswith("KeyboardInterrupt"), outcome.text
    for rank in (0, 1):
        assert_stopped(outcome, rank, "rank 2 failed: KeyboardInterrupt")


def test_a_rank_that_has_ended_well_still_answers_and_still_fails_with_the_others(tmp_path):
    script = """
plane.serve("parameters", {"w": torch.arange(3)}.get)
if rank == 0:
    time.sleep(0.5)
    assert plane.fetch(1, "parameters", "w").tolist() == [0, 1, 2]
    raise ValueError("late")
"""
    outcome = run(script, tmp_path)
    assert "ValueError: late" in outcome.errors[0]
    for rank in (1, 2):
        assert_stopped(outcome, rank, "rank 0 failed: ValueError: late")


def test_waiting_for_a_rank_whose_script_has_ended_is_a_failure(tmp_path):
    script = """
if rank == 1:
    receive(peer=0)
"""
    outcome = run(script, tmp_path)
    text = "rank 0's script has ended, and rank 1 still waits for it"
    assert outcome.errors[1] == f"[pfeife rank 1/3] failed, stopping all ranks: {text}\n", outcome.text
    for rank in (0, 2):
        assert_stopped(outcome, rank, f"rank 1 failed: {text}")


def test_a_collective_with_a_rank_whose_script_has_ended_is_a_failure(tmp_path):
    script = """
if rank == 1:
    dist.all_reduce(torch.zeros(1))
"""
    outcome = run(script, tmp_path)
    text = "rank 0's script has ended, and rank 1 still waits for all ranks in a collective ("
    other = text.replace("rank 0", "rank 2")
    assert text in outcome.errors[1] or other in outcome.errors[1], outcome.text
    assert f"{tmp_path / 'script.py'}:" in outcome.errors[1]
    for rank in (0, 2):
        assert outcome.codes[rank] == 1 and outcome.errors[rank].count("\n") == 1, outcome.text
    assert outcome.wall_s < 10


def test_forked_processes_keep_no_connection_and_report_nothing(tmp_path):
    # As dataloader workers do: they outlive their killed parent, and fail in their own way.
    script = """
import multiprocessing
def work(fails):
    if fails:
        raise ValueError("worker")
    time.sleep(8)
context = multiprocessing.get_context("fork")
process = context.Process(target=work, args=(True,))
process.start()
process.join()
dist.barrier()
assert plane.failure is None
if rank == 2:
    context.Process(target=work, args=(False,)).start()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    outcome = run(script, tmp_path)
    for rank in (0, 1):
        assert outcome.codes[rank] == 1, outcome.text
        assert "stopped because rank 2 failed: rank 2 ended without a word (killed?)" in outcome.errors[rank]
    assert outcome.wall_s < 6, outcome.text
