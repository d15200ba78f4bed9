"""A rank holds memory for its own stages only: counted by bytes, and by what the operating system sees."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.launching import run_command, run_ranks

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to reset the peak"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"

# The example as it is, with its 30 M parameters, ended after the training; marks are taken around it.
SCRIPT = f"""
import gc, json, os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import finetune_llama
import torch
from accelerate import Accelerator

def size(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

class Over(Exception):
    pass

def over(model, *_):
    raise Over

def prepare(self, *args, **kwargs):
    prepared.extend(original_prepare(self, *args, **kwargs))
    return tuple(prepared)

prepared = []
original_prepare, Accelerator.prepare = Accelerator.prepare, prepare
finetune_llama.evaluate = over
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")
before = size("VmRSS")
try:
    finetune_llama.main()
except Over:
    growth = size("VmHWM") - before
model, optimizer = prepared[:2]
state = optimizer.optimizer.state
own = [p for p in model.parameters() if not p.is_meta]
facts = dict(
    growth=growth,
    total_bytes=sum(p.nbytes for p in model.parameters()),
    parameter_bytes=sum(p.nbytes for p in own),
    state_bytes=sum(t.nbytes for p in state for t in state[p].values() if t.numel() > 1),
    names=[name for name, p in model.named_parameters() if not p.is_meta],
    stray_states=sum(p.is_meta or q.is_meta for p in state for q in state[p].values()),
    stray_gradients=sum(p.grad is not None for p in model.parameters() if p.is_meta),
    missing_states=sum(p not in state for p in own),
    # No second copy either, whoever may refer to it.
    large_bytes=sum(t.nbytes for t in {{
        t.untyped_storage().data_ptr(): t for t in gc.get_objects()
        if type(t) is torch.nn.Parameter and not t.is_meta
    }}.values()),
)
sys.stdout.write(json.dumps(facts) + chr(10))
"""


def test_a_rank_holds_its_own_stages_only(tmp_path):
    args = ["--steps=2", f"--output_dir={tmp_path}"]
    alone = run_command([sys.executable, "-c", SCRIPT, *args], timeout=120).check()
    pipelined = run_ranks(
        SCRIPT, num_processes=2, args=args, env={"PFEIFE_ENABLED": "true"}, timeout=200, fresh=True
    ).check()
    (plain,) = (json.loads(line) for line in alone.lines("{"))
    ranks = [json.loads(line) for line in pipelined.lines("{")]
    total = plain["total_bytes"]
    for rank in ranks:
        assert rank["total_bytes"] == total
        assert rank["stray_states"] == rank["stray_gradients"] == rank["missing_states"] == 0
        assert rank["state_bytes"] == 2 * rank["parameter_bytes"], "two moments of Adam"
        assert rank["large_bytes"] == rank["parameter_bytes"]
        assert 0.3 * total < rank["parameter_bytes"] < 0.7 * total
    first, second = (set(rank["names"]) for rank in ranks)
    assert not first & second
    assert first | second == set(plain["names"])
    assert sum(rank["parameter_bytes"] for rank in ranks) == total
    growth = max(rank["growth"] for rank in ranks)
    print(f"growth {growth / 2**20:.0f} MiB of {plain['growth'] / 2**20:.0f} MiB: {growth / plain['growth']:.0%}")
    assert growth <= 0.65 * plain["growth"], (ranks, plain)
