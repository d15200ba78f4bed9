"""Several pipelines train as DistributedDataParallel does: the same script in two plain processes is what counts."""

from __future__ import annotations

import json

import pytest
import torch

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(280)]

# Nothing is seeded alike before `prepare`: what makes the replicas equal is the main process's model.
SCRIPT = """
import json, os, sys
import torch
import torch.nn.functional as F
from torch import nn
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed

folder, world_rank = sys.argv[1], int(os.environ["RANK"])
events = []  # backwards of stages, and the starts of sums over pipelines

def note_events():
    import torch.distributed as dist
    from pfeife_accelerate.runtime.executor import Executor
    all_reduce, run = dist.all_reduce, Executor.run

    def noted_reduce(tensor, *args, async_op=False, **kwargs):
        if async_op:
            events.append("mean")
        return all_reduce(tensor, *args, async_op=async_op, **kwargs)

    def noted_run(self, program, inputs, state, recorder=None):
        backwards = [a for a in program.actions if a.kind.is_backward]
        perform = torch.autograd.backward

        def noted_backward(*args, **kwargs):
            perform(*args, **kwargs)
            events.append(str(backwards.pop(0)))

        torch.autograd.backward = noted_backward
        try:
            run(self, program, inputs, state, recorder)
        finally:
            torch.autograd.backward = perform

    dist.all_reduce, Executor.run = noted_reduce, noted_run

if "PFEIFE_NUM_MICROBATCHES" in os.environ:
    note_events()


class Net(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        # No bias before BatchNorm: its gradient is mere rounding, which AdamW blows up.
        into = nn.Linear(6, 24, bias=False)
        norm = nn.BatchNorm1d(24) if norm else nn.Identity()
        self.first = nn.Sequential(into, norm, nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))

    def forward(self, x, skip=False):
        return self.last(self.first[:3](x) if skip else self.first(x))

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, number):
        return torch.sin(torch.arange(6) * (number + 1.0)), number % 4, number

is_plain = "PFEIFE_NUM_MICROBATCHES" not in os.environ
unused = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[unused] if is_plain else [])
facts = dict(
    world_rank=world_rank, num_processes=accelerator.num_processes, index=accelerator.process_index,
    is_main=accelerator.is_main_process, steps=[], gradients=[], rates=[], events=[],
)
torch.manual_seed(0 if world_rank == 0 else 100 + world_rank)
model = Net()
set_seed(5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
loader = torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True)
eval_loader = torch.utils.data.DataLoader(Samples(), batch_size=4)
model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, loader, eval_loader, scheduler)

def gradients(model=model):
    held = ((name.removeprefix("module."), p.grad) for name, p in model.named_parameters() if not p.is_meta)
    return {name: grad.norm().item() for name, grad in held if grad is not None}

for epoch in range(3):
    for x, y, number in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            is_read = epoch == 2
            if is_read and world_rank == 0:
                loss.item()  # the schedule has run before the backward, in one of the pipelines
            events.clear()
            accelerator.backward(loss)
            facts["events"].append([accelerator.sync_gradients, is_read, list(events)])
            norm = None
            if accelerator.sync_gradients:
                facts["gradients"].append(gradients())
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        facts["steps"].append(dict(numbers=number.tolist(), loss=loss.item(), norm=norm,
                                   mean=accelerator.gather(loss.detach().reshape(1)).mean().item()))
        facts["rates"].append(scheduler.get_last_lr()[0])

# Accumulation by hand: gradients stay a pipeline's own until the last backward.
x, y, _ = next(iter(loader))
with accelerator.no_sync(model):
    accelerator.backward(F.cross_entropy(model(x), y))
facts["unsynchronised"] = gradients()
accelerator.gradient_state._set_sync_gradients(True)
accelerator.backward(F.cross_entropy(model(x), y))
facts["synchronised"] = gradients()
optimizer.zero_grad()

# Backwards that differ between the pipelines, and such that take several schedules.
torch.manual_seed(0 if world_rank == 0 else 100 + world_rank)
other = Net(norm=False)
other.last[0].weight = other.first[3].weight  # on both ranks
other = accelerator.prepare(other)
scale = nn.Parameter(torch.ones(()))
is_first = accelerator.process_index == 0

def read(wanted):
    outputs = other(x)
    if wanted:
        float(outputs.sum())
    return F.cross_entropy(outputs, y)

CASES = dict(
    usual=lambda: read(False),
    unused_in_one=lambda: F.cross_entropy(other(x, skip=is_first), y),
    read_before=lambda: read(True),
    read_before_in_one=lambda: read(is_first),
    two_calls=lambda: read(False) + other(-x).square().mean(),
    trainable_loss=lambda: read(False) * scale,
)
facts["cases"] = {}
for name, loss in CASES.items():
    events.clear()
    accelerator.backward(loss())
    facts["cases"][name] = dict(gradients=gradients(other), events=list(events))
    for p in other.parameters():
        p.grad = None

model.eval()
counted, predicted = [], []
with torch.no_grad():
    for x, y, number in eval_loader:
        logits, numbers = accelerator.gather_for_metrics((model(x), number))
        counted += numbers.tolist()
        predicted += logits.double().sum(1).tolist()
facts |= dict(counted=counted, predicted=predicted)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(folder, "state.pt"))
with open(os.path.join(folder, f"{world_rank}.json"), "w") as file:
    json.dump(facts, file)
"""


def train(folder, num_processes, **env):
    folder.mkdir()
    run_ranks(
        SCRIPT, num_processes=num_processes, args=[str(folder)], env={"ACCELERATE_USE_CPU": "true", **env}, timeout=120
    ).check()
    facts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
    return facts, torch.load(folder / "state.pt")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "run", 2)


# One micro-batch: with more, BatchNorm sees other batches than in the plain run.
@pytest.mark.parametrize(("pipeline_size", "num_processes"), [(2, 4), (1, 2)])
def test_pipelines_train_as_plain_processes_do(plain, tmp_path, pipeline_size, num_processes):
    env = {"PFEIFE_PIPELINE_SIZE": str(pipeline_size), "PFEIFE_NUM_MICROBATCHES": "1"}
    if pipeline_size > 1:
        env |= {"PFEIFE_SCHEDULE": "looped", "PFEIFE_SPLIT_POINTS": "first.3,last.0,last.2"}
    facts, state = train(tmp_path / "run", num_processes, **env)
    references, reference_state = plain
    for fact in facts:
        if pipeline_size > 1:
            assert_means_start_between_backwards(fact)
        assert fact["num_processes"] == 2
        assert fact["index"] == fact["world_rank"] // pipeline_size
        assert fact["is_main"] == (fact["world_rank"] == 0)
        assert_like(fact, references[fact["index"]])
    assert list(state) == list(reference_state)
    for name, value in reference_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def assert_like(fact, reference):
    assert [step["numbers"] for step in fact["steps"]] == [step["numbers"] for step in reference["steps"]]
    for key in ("loss", "mean"):
        wanted = [step[key] for step in reference["steps"]]
        assert [step[key] for step in fact["steps"]] == pytest.approx(wanted, rel=1e-4)
    norms = [(step["norm"], other["norm"]) for step, other in zip(fact["steps"], reference["steps"], strict=True)]
    assert [a is None for a, _ in norms] == [b is None for _, b in norms]
    assert [a for a, _ in norms if a is not None] == pytest.approx([b for _, b in norms if b is not None], rel=1e-4)
    assert fact["rates"] == pytest.approx(reference["rates"], rel=1e-12)
    for step, other in zip(fact["gradients"], reference["gradients"], strict=True):
        assert_gradients(step, other)
    for key in ("unsynchronised", "synchronised"):
        assert_gradients(fact[key], reference[key])
    for name, case in fact["cases"].items():
        assert_gradients(case["gradients"], reference["cases"][name]["gradients"])
    assert fact["counted"] == reference["counted"]
    assert sorted(fact["counted"]) == list(range(22))
    assert fact["predicted"] == pytest.approx(reference["predicted"], rel=1e-4, abs=1e-4)


def assert_gradients(found, wanted):
    assert 0 < len(found) <= len(wanted)
    largest = max(wanted.values())
    for name, norm in found.items():
        assert norm == pytest.approx(wanted[name], rel=1e-4, abs=1e-5 * largest), name


def assert_means_start_between_backwards(fact):
    rank = fact["world_rank"] % 2
    for synchronises, is_read, events in fact["events"]:
        backwards = [f"{rank + 2}B0", f"{rank}B0"]
        if is_read and fact["index"] == 0:  # rank 0 has run it before; rank 1 may have
            assert events.count("mean") == (2 if synchronises else 0)
            assert rank == 1 or set(events) <= {"mean"}
        elif synchronises:
            assert events == [backwards[0], "mean", backwards[1], "mean"]
        else:
            assert events == backwards
    for name, case in fact["cases"].items():
        assert case["events"].count("mean") == 3  # of two stages, and of the parameter tied to the other rank's
        if not name.startswith("read_before"):  # there, the schedule may have run before the backward
            assert is_early(case["events"]) is (name in ("usual", "unused_in_one")), name


def is_early(events):
    """Whether a mean has started before the last backward of the rank."""
    return any(event != "mean" for event in events[events.index("mean") :])
