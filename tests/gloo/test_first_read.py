"""Parameters read right after the first call, while another rank is still putting its own in place."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

SCRIPT = """
import os, time
import torch
from torch import nn
from accelerate import Accelerator
from pfeife_accelerate.session.placement import Placement

SLOW = 0
if int(os.environ["RANK"]) == SLOW:
    apply = Placement.apply
    Placement.apply = lambda *args: (time.sleep(1.0), apply(*args))[1]

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
start = [p.detach().clone() for p in model.parameters()]
model = accelerator.prepare(model)
loss = model(torch.zeros(8, 6)).mean() * 0
for p, q in zip(model.parameters(), start, strict=True):
    torch.testing.assert_close(p.detach().clone(), q)
accelerator.backward(loss)
print("done")
"""


def test_parameters_are_read_while_another_rank_still_places_its_own():
    result = run_ranks(SCRIPT, num_processes=2, env={"PFEIFE_ENABLED": "true"}, timeout=100).check()
    assert result.stdout.count("done") == 2
