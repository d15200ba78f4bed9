"""Parameters of other ranks in a script's hands: averages, penalties, edits of gradients, reads for a log.

Each script trains an ordinary twin of the model beside the pipelined one, in the same process, and compares.
"""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

COMMON = """
import copy, os, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from accelerate import Accelerator

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight  # held by the first and the last rank

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))

def build():
    torch.manual_seed(0)
    return Net()

def same(found, wanted, what=""):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")

def same_parameters(what):
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        same(p.detach(), q.detach(), f"{what}: {name}")

def groups(module, decay=0.01):
    decayed = [p for n, p in module.named_parameters() if not n.endswith("bias") and "norm" not in n]
    others = [p for n, p in module.named_parameters() if n.endswith("bias") or "norm" in n]
    return [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]

def batch():
    return torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))

def loss_of(net, ids, labels):
    return F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())

def step(term=lambda net: 0.0, edit=lambda net: None, check=True):
    ids, labels = batch()
    for net, opt in ((twin, twin_optimizer), (model, optimizer)):
        opt.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        loss = loss_of(net, ids, labels)
        loss = loss + term(net)
        accelerator.backward(loss)
        edit(net)
        if check:
            losses[net is model] = loss.detach()
    if check:
        same(losses[True], losses[False], "loss")
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters()):
        if not p.is_meta:
            assert (p.grad is None) == (q[1].grad is None), name
            if p.grad is not None:
                same(p.grad, q[1].grad, f"gradient of {name}")
    optimizer.step()
    twin_optimizer.step()

losses = {}
accelerator = Accelerator()
main = accelerator.is_main_process
twin, model = build(), build()
twin_optimizer = torch.optim.AdamW(groups(twin), lr=1e-2)
optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
"""

AVERAGES = (
    COMMON
    + """
from torch.optim.swa_utils import AveragedModel
from diffusers.training_utils import EMAModel

folder = sys.argv[1]
model, optimizer = accelerator.prepare(model, optimizer)
assert all(p.grad is None for p in model.parameters())
step()
kinds = dict(plain=EMAModel, foreach=lambda p, **k: EMAModel(p, foreach=True, **k))
emas = {k: (make(model.parameters(), decay=0.8), make(twin.parameters(), decay=0.8)) for k, make in kinds.items()}
averaged = [AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)) for net in (model, twin)]
targets = [copy.deepcopy(net) for net in (model, twin)]
loaded = [build(), build()]
shadows = [[p.detach().clone() for p in net.parameters()] for net in (model, twin)]
for _ in range(3):
    step()
    for number, net in enumerate((model, twin)):
        for pair in emas.values():
            pair[number].step(net.parameters())
        averaged[number].update_parameters(net)
        with torch.no_grad():
            for s, p in zip(shadows[number], net.parameters()):
                s.lerp_(p, 0.1)
            for t, p in zip(targets[number].parameters(), net.parameters()):
                t.data.mul_(0.9).add_(p.data, alpha=0.1)
        loaded[number].load_state_dict(net.state_dict())
    same_parameters("after a step")
    for a, b in zip(shadows[0], shadows[1]):
        same(a, b, "by hand")
    for pair in (averaged, targets, loaded):
        for a, b in zip(pair[0].state_dict().values(), pair[1].state_dict().values()):
            same(a, b, "averaged")
    for name, (mine, wanted) in emas.items():
        for a, b in zip(mine.shadow_params, wanted.shadow_params):
            same(a, b, name)

from pfeife_accelerate import session
control, requests = session.current().control, []
control.fetch_many = lambda *a, **k: requests.append(len(a[2])) or type(control).fetch_many(control, *a, **k)
for p in model.parameters():
    p.sum()
del control.fetch_many
assert sum(requests) == sum(p.is_meta for p in model.parameters())
owners = {p.place.source.rank_of(p.place.name) for p in model.parameters() if p.is_meta}
assert len(requests) <= 2 * len(owners), requests

ids, _ = batch()
before = [q.detach().clone() for q in twin.parameters()]
accelerator.wait_for_everyone()  # a change by hand is seen by a rank that is still reading
for mine, wanted in emas.values():
    if main:  # the others go on to the next step
        mine.store(model.parameters())
        mine.copy_to(model.parameters())
        wanted.copy_to(twin.parameters())
        with torch.no_grad():
            same(model(ids), twin(ids), "validation with averaged parameters")
        found, wanted_state = accelerator.unwrap_model(model).state_dict(), twin.state_dict()
        for name, value in wanted_state.items():
            same(found[name], value, name)
        torch.save(found, folder + "/averaged.pt")
        same(torch.load(folder + "/averaged.pt")["blocks.0.0.weight"], wanted_state["blocks.0.0.weight"], "saved")
        mine.restore(model.parameters())
        with torch.no_grad():
            for q, value in zip(twin.parameters(), before):
                q.copy_(value)
        same_parameters("restored")
for _ in range(2):
    step()
same_parameters("at the end")
accelerator.wait_for_everyone()
# The averaged parameters into the model, on all ranks: each keeps its own part.
for number, net in enumerate((model, twin)):
    emas["plain"][number].copy_to(net.parameters())
with torch.no_grad():
    same(model(ids), twin(ids), "averaged parameters on all ranks")
for (name, value), wanted in zip(model.state_dict().items(), twin.state_dict().values()):
    same(value, wanted, name)
print("done", flush=True)
"""
)

LOSSES = (
    COMMON
    + """
model, optimizer = accelerator.prepare(model, optimizer)
def last(net):
    return net.blocks[3][0].weight

def use(net, edit=lambda p: None):
    for p in net.parameters():
        edit(p)

def by_name(net):
    for name, p in net.named_parameters():
        if name.startswith("blocks.0") or name.startswith("blocks.3"):
            p.grad = None

def clear_again(net):
    for p in net.parameters():
        p.grad = torch.zeros_like(p)

step()
terms = dict(
    l2=lambda net: 0.1 * sum(p.pow(2).sum() for p in net.parameters()),
    l1_of_some=lambda net: 0.1 * sum(p.abs().sum() for n, p in net.named_parameters() if "bias" in n),
    first=lambda net: net.blocks[0][0].weight.norm(),
    last=lambda net: last(net).square().mean(),
    tied=lambda net: net.embed.weight.square().sum() + net.head.weight.mean(),
    both=lambda net: (last(net) @ net.blocks[0][0].weight.T - torch.eye(8)).square().sum(),
    distance=lambda net: F.mse_loss(net.blocks[1][0].weight, net.blocks[2][0].weight),
)
for name, term in terms.items():
    step(term)
    same_parameters(name)

# Parameters in operations on the outputs themselves: each is one constant of the loss on every rank.
ids, labels = batch()
for uses in (lambda net, out: F.linear(out @ net.embed.weight, last(net), net.blocks[0][0].bias).square().mean(),
             lambda net, out: (out * net.norm.weight.sum() + last(net)[0, 0]).logsumexp(-1).mean(),
             lambda net, out: torch.stack([out.mean(), last(net).norm(), net.blocks[0][0].weight.norm()]).prod()):
    for net, opt in ((twin, twin_optimizer), (model, optimizer)):
        opt.zero_grad()
        accelerator.backward(uses(net, net(ids)))
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        if not p.is_meta:
            same(p.grad, q.grad, name)
    optimizer.step(), twin_optimizer.step()
    same_parameters("used on the outputs")

edits = dict(
    mul=lambda net: use(net, lambda p: p.grad.mul_(0.5)),
    clamp=lambda net: use(net, lambda p: p.grad.clamp_(-1e-2, 1e-2)),
    div=lambda net: use(net, lambda p: p.grad.div_(2.0)),
    decay=lambda net: use(net, lambda p: p.grad.add_(p.data, alpha=0.1)),
    data=lambda net: use(net, lambda p: p.grad.data.mul_(2)),
    detach=lambda net: use(net, lambda p: p.grad.detach_().mul_(2)),
    nan=lambda net: use(net, lambda p: torch.nan_to_num_(p.grad)),
    none=by_name,
    given=clear_again,
    foreach=lambda net: torch._foreach_mul_([p.grad for p in net.parameters()], 3.0),
    value=lambda net: nn.utils.clip_grad_value_(net.parameters(), 1e-3),
    accelerate_value=lambda net: accelerator.clip_grad_value_(net.parameters(), 1e-3),
    norm=lambda net: accelerator.clip_grad_norm_(net.parameters(), 0.1),
    reset=lambda net: [net.zero_grad(), net.zero_grad(set_to_none=False)],
)
for name, edit in edits.items():
    step(edit=edit)
    same_parameters(name)
step()
assert all(p.grad is not None for p in model.parameters())
optimizer.zero_grad(set_to_none=False)
assert all(p.grad is None for p in model.parameters() if p.is_meta)
for net, opt in ((twin, twin_optimizer), (model, optimizer)):
    opt.zero_grad()
    accelerator.backward(loss_of(net, ids, labels))
for edit in (lambda net: None, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1), edits["value"]):
    edit(model), edit(twin)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        same(p.grad, q.grad, name)  # those of other ranks too
norms = []
for net, opt in ((twin, twin_optimizer), (model, optimizer)):
    opt.zero_grad()
    accelerator.backward(loss_of(net, ids, labels))
    norms.append(accelerator.clip_grad_norm_(net.parameters(), float("inf")))
same(*norms, "norm over the whole model")

for net, opt in ((twin, twin_optimizer), (model, optimizer)):
    def closure(net=net, opt=opt):
        opt.zero_grad()
        loss = loss_of(net, ids, labels) + terms["l2"](net)
        losses[net is model] = loss.item()
        accelerator.backward(loss)
        return loss
    opt.step(closure)
same(torch.tensor(losses[True]), torch.tensor(losses[False]), "loss in a closure")
same_parameters("stepped with a closure")

for frozen in ((True, False), (False, True), (False, False)):
    for net in (model, twin):
        net.blocks[0].requires_grad_(not frozen[0])
        net.blocks[3].requires_grad_(not frozen[1])
    for term in (terms["l2"], terms["both"]):
        step(term)
        same_parameters(f"frozen {frozen}")
if main:  # a log
    same(last(model).norm(), last(twin).norm())
    for p, q in zip(model.parameters(), twin.parameters()):
        assert repr(p).startswith("Parameter containing:")
        assert f"{p.data.mean():.3f}" == f"{q.data.mean():.3f}"
for net, opt in ((twin, twin_optimizer), (model, optimizer)):  # a penalty by hand, on ranks of different speed
    opt.zero_grad()
    accelerator.backward(loss_of(net, ids, labels))
    for number, p in enumerate(net.parameters()):
        if net is model and main and number == 2:
            time.sleep(0.5)  # the others have stepped meanwhile
        if p.grad is not None:
            p.grad = p.grad + 0.01 * p.detach()
    opt.step()
same_parameters("values read between backward and step")
step()
accelerator.wait_for_everyone()  # or the next lines would run on one rank while another still reads
same_parameters("before a change by hand")
accelerator.wait_for_everyone()
with torch.no_grad():
    for net in (model, twin):
        for p in net.parameters():
            p.mul_(0.9)
            p.data.clamp_(-0.5, 0.5)
accelerator.wait_for_everyone()
same_parameters("changed by hand")
step()
same_parameters("a step later")
print("done", flush=True)
"""
)

REFUSALS = (
    COMMON
    + """
from pfeife_accelerate.errors import PfeifeError
flag = sys.argv[1] + "/stepped"

def refusal(action):
    try:
        action()
    except PfeifeError as error:
        print(" ".join(str(error).split()) + chr(10), end="", flush=True)
    else:
        raise AssertionError("not refused")

penalty = sum(p.square().sum() for p in model.parameters()) if sys.argv[2:] else 0.0
model, optimizer = accelerator.prepare(model, optimizer)
ids, labels = batch()
loss = loss_of(model, ids, labels)
p = next(p for p in model.parameters() if p.is_meta)
refusal(lambda: torch.autograd.grad(p.square().sum(), p))
accelerator.backward(loss + penalty)
whole = sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt()
same(whole, accelerator.clip_grad_norm_(model.parameters(), float("inf")), "norm by hand")
if main:
    time.sleep(0.5)
    same(whole, nn.utils.get_total_norm([p.grad for p in model.parameters()]), "a late reader")
p.grad.data.mul_(2)
refusal(lambda: p.grad.isnan().any().item())
if not main:
    optimizer.step()
    open(flag, "w").close()
while not os.path.exists(flag):
    time.sleep(0.01)
if main:
    refusal(lambda: p.norm())
    refusal(lambda: model.state_dict())
    optimizer.step()
    p.norm()
accelerator.wait_for_everyone()
with torch.no_grad():
    p.mul_(2)
refusal(lambda: p.norm())
accelerator.wait_for_everyone()
p.norm()
lbfgs = accelerator.prepare(torch.optim.LBFGS(model.parameters()))
refusal(lambda: lbfgs.step(lambda: 0.0))
print("done", flush=True)
"""
)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_averages_of_the_parameters_are_those_of_one_process(size, tmp_path):
    pytest.importorskip("diffusers")
    args = (str(tmp_path),)
    result = run_ranks(AVERAGES, num_processes=size, args=args, env={"PFEIFE_ENABLED": "true"}, timeout=360).check()
    assert result.stdout.count("done") == size


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_penalties_and_edits_of_gradients_are_those_of_one_process(size):
    result = run_ranks(LOSSES, num_processes=size, env={"PFEIFE_ENABLED": "true"}, timeout=360).check()
    assert result.stdout.count("done") == size


def test_what_cannot_be_known_is_refused_and_says_what_to_do(tmp_path):
    args = (str(tmp_path),)
    result = run_ranks(REFUSALS, num_processes=2, args=args, env={"PFEIFE_ENABLED": "true"}, timeout=240).check()
    assert result.stdout.count("done") == 2
    for rank in (0, 1):
        assert f", which lives on rank {rank}, is read after a change that is known there alone" in result.stdout
    for words, times in {
        "PF525 the gradient of '": 2,
        "is read after a change that is known there alone: `grad.data.mul_`": 2,
        "PF526 `grad` was asked for the gradient with respect to a parameter that lives on another rank": 2,
        "PF414 '": 2,
        "was asked for too late: rank 1 has changed it meanwhile": 2,
        "read it before backward or after the step": 2,
        "PF527 the value of '": 2,
        "is not known on this rank until all ranks meet again": 2,
        "PF528 the optimizer LBFGS cannot train a pipelined model": 2,
    }.items():
        assert result.stdout.count(words) == times, (words, result.stdout)


def test_a_penalty_made_before_the_first_call_is_refused(tmp_path):
    args = (str(tmp_path), "penalty first")
    result = run_ranks(REFUSALS, num_processes=2, args=args, env={"PFEIFE_ENABLED": "true"}, timeout=240)
    assert result.returncode not in (0, None)
    assert "PF529" in result.stderr
    assert "is part of a computation that was made before the model was placed" in result.stderr
