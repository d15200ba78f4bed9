"""While operations are measured for a plan, every rank is as busy as in a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

SCRIPT = """
import json, os, sys, time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from pfeife_accelerate.session import planning

measured_costs = planning.measured_costs


def noted(plugin, call, rows, device, **options):
    began_s = time.monotonic()
    found = measured_costs(plugin, call, rows, device, **options)
    note = {"rows": rows, "began_s": began_s, "ended_s": time.monotonic(), "shown": options.get("is_shown", True)}
    with open(Path(sys.argv[1], os.environ["RANK"]), "a") as file:
        file.write(json.dumps(note) + "\\n")
    return found


planning.measured_costs = noted
accelerator = Accelerator()
torch.manual_seed(0)
model = accelerator.prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
accelerator.backward(model(torch.randn(8, 64)).square().mean())
"""


def test_all_ranks_measure_the_same_at_the_same_time_and_one_shows_it(tmp_path: Path):
    notes = tmp_path / "notes"
    notes.mkdir()
    cache = {"PFEIFE_CACHE_DIR": str(tmp_path / "cache")}
    run_ranks(SCRIPT, num_processes=2, args=(str(notes),), timeout=60, env=cache).check()
    ours, theirs = ([json.loads(line) for line in (notes / rank).read_text().splitlines()] for rank in "01")
    assert ours and [note["rows"] for note in ours] == [note["rows"] for note in theirs]
    assert {note["shown"] for note in ours} == {True} and {note["shown"] for note in theirs} == {False}
    for mine, other in zip(ours, theirs, strict=True):
        both_s = min(mine["ended_s"], other["ended_s"]) - max(mine["began_s"], other["began_s"])
        assert both_s > 0, "one after the other"
