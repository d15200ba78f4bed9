"""The option `trace`: steps of a real training, recorded by all ranks into one file."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pfeife_accelerate.ir import Action, ActionKind, Timeline
from pfeife_accelerate.ir.trace import Trace
from pfeife_accelerate.schedule import lower, messages_between
from pfeife_accelerate.tools.trace import read_trace
from tests.launching import Result, run_command

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SCRIPT = """
import sys
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(8, 64)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(8, 64))
    sys.stdout.write(f"loss {step} {loss.item():.10f}\\n")  # in one piece: two ranks share the pipe
    sys.stdout.flush()
"""


def check_sound(trace: Trace, timeline: Timeline, clock_error_s: float) -> None:
    plan = trace.plan
    values = ((edge.producer, edge.consumers, edge.spec.requires_grad) for edge in plan.edges)
    lists = lower(plan.schedule, messages_between(values, plan.stage_ranks)).per_rank
    noted = Counter((i.rank, i.action) for i in timeline.intervals)
    receives = (ActionKind.RECV_F, ActionKind.RECV_B)
    assert noted == Counter((r, a) for r, actions in enumerate(lists) for a in actions if a.kind not in receives)
    for rank, actions in enumerate(plan.schedule.per_rank):
        own = [i for i in timeline.intervals if i.rank == rank and i.action.kind.is_compute]
        assert tuple(i.action for i in own) == actions
        assert all(first.end_s <= second.start_s for first, second in pairwise(own))
        assert all(i.duration_s > 0 for i in own)
    at = {(i.rank, i.action): i for i in timeline.intervals}
    for (rank, action), interval in at.items():
        if action.kind is ActionKind.SEND_F:
            assert interval.end_s >= interval.start_s - clock_error_s
            made = at[rank, Action(kind=ActionKind.FORWARD, stage=action.stage, microbatch=action.microbatch)]
            assert made.end_s <= interval.start_s, "it is sent when it has been made"
            read = Action(kind=ActionKind.FORWARD, stage=action.reader, microbatch=action.microbatch)
            assert interval.end_s <= at[action.peer, read].end_s + clock_error_s, "it is read when it is there"


def pfeife_trace(folder: Path, script: str, *arguments: str) -> Result:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "pfeife_accelerate.tools.cli", "trace", "--out", str(folder / "trace.json")]
    command += ["--processes", "2", "--perfetto", str(folder / "perfetto.json"), str(folder / "train.py"), *arguments]
    env = {"PFEIFE_NUM_MICROBATCHES": "4", "PFEIFE_TRACE_AFTER": "1", "ACCELERATE_USE_CPU": "true"}
    return run_command(command, env=env, timeout=180)


def test_the_command_runs_a_script_and_gives_a_sound_timeline(tmp_path):
    result = pfeife_trace(tmp_path, SCRIPT, "4").check()
    assert len(result.lines("loss")) == 2 * 4 and len(set(result.lines("loss"))) == 4
    for text in ("recorded training steps 2, 3, 4", "Links, one message", "for ui.perfetto.dev", "written to"):
        assert text in result.stdout
    assert "no step was recorded" not in result.stderr and (tmp_path / "perfetto.json").exists()

    trace = read_trace(tmp_path / "trace.json")
    assert [step.number for step in trace.steps] == [2, 3, 4]
    assert trace.plan.machine is not None and trace.plan.machine.link.bytes_per_s > 1e6
    for step in trace.steps:
        assert step.num_microbatches == 4 and 0 < step.clock_error_s < 0.1
        check_sound(trace, step.timeline, step.clock_error_s)


def test_the_command_says_so_where_nothing_was_recorded(tmp_path):
    result = pfeife_trace(tmp_path, "")
    assert result.returncode == 2 and "PF235" in result.stderr and "ended before any step was recorded" in result.stderr
    assert not (tmp_path / "trace.json").exists()
