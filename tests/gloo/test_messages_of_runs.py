"""Messages that several processes together give rise to: what every rank refuses alike, and what ends the run."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SETUP = """
import gc, os, sys
import torch
from torch import nn
from accelerate import Accelerator

rank = int(os.environ["RANK"])
fault = sys.argv[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.activation = nn.ReLU() if fault == "model" and rank == 1 else nn.Tanh()

    def forward(self, x, extra=None, backwards=False):
        for layer in reversed(self.layers) if backwards else self.layers:
            x = self.activation(layer(x))
        return x if extra is None else x + extra.mean(0)


accelerator = Accelerator()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
x = torch.randn(8, 8)
if fault == "data" and rank == 0:
    x[3, 3] += 1
"""

REFUSED = (
    SETUP
    + """
from pfeife_accelerate.errors import PfeifeError

def refusal(action):
    try:
        action()
    except PfeifeError as error:
        print("refused", rank, " ".join(str(error).split()) + chr(10), end="", flush=True)
    else:
        raise AssertionError("not refused")

def step(outputs):
    accelerator.backward(outputs.mean())
    optimizer.step()
    optimizer.zero_grad()

def changed_in_place():
    own = x.clone()
    outputs = model(own)
    own.add_(1)
    accelerator.backward(outputs.mean())

def backward_twice():
    loss = model(x).mean()
    accelerator.backward(loss)
    refusal(loss.backward)
    accelerator.backward(loss)

refusal(lambda: accelerator.prepare(nn.Linear(4, 4 + rank)))
for rows in (7, 5):  # as often as the batch: which is it?
    step(model(x, torch.randn(rows, 8)))
refusal(changed_in_place)
refusal(backward_twice)
optimizer.zero_grad()
with torch.no_grad():
    refusal(lambda: model(x, backwards=True))
kept = []
for _ in range(3):
    outputs = model(x)
    if accelerator.is_main_process:
        kept.append(outputs)
    step(outputs)
gc.collect()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    refusal(lambda: kept[0].sum().item())
    kept[2].sum().item()  # the last step's are held
accelerator.wait_for_everyone()
outputs = model(x)
loss = outputs.mean()
if accelerator.is_main_process:
    refusal(lambda: accelerator.backward(loss + outputs.square().mean()))
else:
    accelerator.backward(loss)
print("done", flush=True)
"""
)

WANTED = {
    "PF514 the parameters of Linear have other names, shapes or types on other processes": 2,
    "try build the model alike on all processes": 2,
    "PF507 an argument of the model was changed in place between the call and its use": 2,
    "or pass a copy: tensor.clone()": 2,
    "PF506 backward was called a second time through the same call of the model": 4,
    "try pass retain_graph=True to the first": 4,
    "PF221 operation": 2,
    "cannot run on the stage that holds its parameters": 2,
    "of an earlier step is no longer held by any rank": 1,
    "or keep the output in a variable on every rank while the step runs": 1,
    "PF505 ranks of the pipeline recorded different losses in one step": 1,
    "write the same loss on all processes; only logging may be done on one": 1,
}


def _run(script: str, fault: str, timeout: float):
    env = {"PFEIFE_ENABLED": "true", "PFEIFE_SCHEDULE": "1f1b", "PFEIFE_SPLIT_POINTS": "layers.2"}
    return run_ranks(script, num_processes=2, args=(fault,), env=env, timeout=timeout)


def test_what_all_ranks_refuse_alike_can_be_caught():
    result = _run(REFUSED, "none", 120).check()
    said = "\n".join(result.lines("refused"))
    assert {text: said.count(text) for text in WANTED} == WANTED, result.report()
    assert "refused 0 PF504 the value '" in said
    assert "refused 0 PF505" in said
    doubt = "it is assumed that dimension 0 of 'x' (size 8) is the batch and that 'extra' carries none"
    assert result.stderr.count(doubt) == 1, result.report()
    assert result.lines("done") == ["done", "done"]


FIRST_STEP = SETUP + "accelerator.backward(model(x).mean())\n"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "data",
            (
                "PF513 ranks 0 and 1 of one pipeline were given different batches (1 of 1 tensors differ)",
                "call number 2 of the model",
                "do not seed by process or rank number",
            ),
        ),
        (
            "model",
            (
                "PF222 rank 1 captured another graph of the model than rank 0",
                "build the model alike on all processes",
            ),
        ),
    ],
)
def test_what_one_rank_notices_ends_the_run(fault: str, words: tuple[str, ...]):
    result = _run(FIRST_STEP, fault, 90)
    assert result.returncode not in (0, None), result.report()
    for text in words:
        assert text in result.stderr, result.report()
