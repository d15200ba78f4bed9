"""State is whole wherever it is asked for: by all ranks or one, before and after steps, copied, saved, loaded.

Each script trains an ordinary twin of the model beside the pipelined one, in the same process, and compares.
"""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(150)]

COMMON = """
import copy, os, sys, time, warnings
import torch
import torch.nn.functional as F
from torch import nn
from accelerate import Accelerator
from safetensors.torch import load_file

folder = sys.argv[1]
accelerator = Accelerator()
main = accelerator.is_main_process

def assert_same(found, wanted, what):
    assert list(found) == list(wanted), (what, set(found) ^ set(wanted))
    for name, value in wanted.items():
        assert not found[name].is_meta, (what, name)
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {name}: {text}")

def trainable(module):
    return [p for p in module.parameters() if p.requires_grad]
"""

LLAMA = (
    COMMON
    + """
from transformers import LlamaConfig, LlamaForCausalLM

def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2))

def batch():
    ids = torch.randint(3, 96, (8, 12), generator=numbers)  # what the main process draws alone changes no batch
    return dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))

def step():
    data = batch()
    loss, reference = model(**data).loss, twin(**data).loss
    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
    reference.backward(); twin_optimizer.step(); twin_optimizer.zero_grad()
    torch.testing.assert_close(loss.detach(), reference.detach(), rtol=1e-5, atol=1e-6)

def assert_whole(what):
    assert_same(plain.state_dict(), twin.state_dict(), what)
    assert_same(accelerator.get_state_dict(model), twin.state_dict(), what + ", get_state_dict")
    for layer in range(3):
        assert_same(plain.model.layers[layer].state_dict(), twin.model.layers[layer].state_dict(), what + ", a layer")

def assert_copy(what):
    copied = copy.deepcopy(plain)
    assert type(copied) is type(twin)
    assert_same(copied.state_dict(), twin.state_dict(), what)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in twin.parameters()]
    loss = copied(**fixed).loss
    torch.testing.assert_close(loss, twin(**fixed).loss)
    loss.backward()

def assert_generates(what, **options):
    torch.manual_seed(3)
    found = model.generate(prompt, max_new_tokens=5, **options)
    torch.manual_seed(3)
    assert torch.equal(found, twin.generate(prompt, max_new_tokens=5, **options)), what

def assert_saved(where):
    path = os.path.join(folder, where)
    if where.startswith("pretrained"):
        plain.save_pretrained(path, is_main_process=main, save_function=accelerator.save)
    else:
        accelerator.save_model(model, path)
    if main:
        tensors = load_file(path + "/model.safetensors")
        assert sum(name in ("model.embed_tokens.weight", "lm_head.weight") for name in tensors) == 1, "tied: once"
        again = build()
        again.load_state_dict(tensors, strict=False)
        assert_same(again.state_dict(), twin.state_dict(), where)
        if where.startswith("pretrained"):
            again = LlamaForCausalLM.from_pretrained(path)
        torch.testing.assert_close(again(**fixed).logits, twin(**fixed).logits, rtol=1e-4, atol=1e-5)

numbers = torch.Generator().manual_seed(1)
twin, model = build(), build()
twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
plain = accelerator.unwrap_model(model)
prompt, fixed = torch.tensor([[5, 6, 7]]), batch()

assert_whole("before the first step")
assert_copy("copied before the first step")
assert_generates("before the first step", do_sample=False)
step()
assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
assert sum(p.is_meta for p in model.parameters()) > 5
assert_whole("after a step")
step()
# The others go on to the next step.
if main:
    assert_whole("on the main process only")
step()
if main:
    assert_copy("copied on the main process only")
step()
assert_copy("copied on all ranks")
model.eval(); twin.eval()
assert_generates("greedily", do_sample=False)
assert_generates("beams", num_beams=3, do_sample=False)
assert_generates("samples", do_sample=True)
if main:
    assert_generates("on the main process only", do_sample=False)
model.train(); twin.train()
step()
assert_saved("pretrained on all")
assert_saved("model on all")
step()
# The others go on to a barrier, then to a step.
if main:
    assert_saved("pretrained on main")
    assert_saved("model on main")
accelerator.wait_for_everyone()
if main:
    assert_saved("pretrained again")
step()
fresh = {name: value.clone() for name, value in build().state_dict().items()}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert str(model.load_state_dict(fresh)) == "<All keys matched successfully>"
twin.load_state_dict(fresh)
assert_whole("after loading")
step()
best = copy.deepcopy(plain.state_dict())
step()
model.load_state_dict(best)
assert_same(plain.state_dict(), best, "loaded back")
twin.load_state_dict(best)
step()
assert_whole("at the end")
# The others' scripts end.
if main:
    time.sleep(1)
    assert_whole("after the others' end")
"""
)

MIXED = (
    COMMON
    + """
class Adapted(nn.Module):
    # A frozen layer with a low-rank adapter.
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.one.weight  # shared by the first and the last stage
        self.last_norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)

    def forward(self, x):
        x = torch.tanh(self.one(self.norm(self.into(x))))
        for block in self.blocks:
            x = x + self.scale * F.gelu(block(x))
        return self.head(self.last_norm(self.other(x)))

def build():
    torch.manual_seed(0)
    return Net()

def step(model, optimizer, twin, twin_optimizer):
    x, y = torch.randn(8, 8), torch.randint(3, (8,))
    accelerator.backward(F.cross_entropy(model(x), y))
    for rows, targets in zip(x.chunk(4), y.chunk(4)):  # BatchNorm sees micro-batches
        (F.cross_entropy(twin(rows), targets) / 4).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert p.requires_grad == q.requires_grad, name
        if not p.is_meta:
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.5), rtol=1e-4, atol=1e-5)
    for stepped in (optimizer, twin_optimizer):
        stepped.step()
        stepped.zero_grad()

def assert_evaluates():
    model.eval(); twin.eval()
    x = torch.randn(8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-5)
    model.train(); twin.train()

def pair(change):
    twin, model = build(), build()
    change(twin); change(model)
    optimizers = [torch.optim.SGD(trainable(m), lr=0.1, momentum=0.9) for m in (model, twin)]
    model, optimizer = accelerator.prepare(model, optimizers[0])
    return model, optimizer, twin, optimizers[1]

everything = model, optimizer, twin, twin_optimizer = pair(lambda module: None)
for _ in range(2):
    step(*everything)
# A weight shared by the first and the last stage is held by both, and what no stage reads by all.
print("held", os.environ["RANK"], not model.one.weight.is_meta, not model.unused.weight.is_meta, flush=True)
assert_same(model.state_dict(), twin.state_dict(), "on all")
step(*everything)
if main:
    assert_same(model.state_dict(), twin.state_dict(), "on the main process only")
assert_evaluates()
step(*everything)
copied = copy.deepcopy(model)
assert copied.one.weight is copied.other.weight
assert_same(copied.state_dict(), twin.state_dict(), "copied")
assert "unsaved" not in model.state_dict()
model.load_state_dict(build().state_dict())
twin.load_state_dict(build().state_dict())
step(*everything)
assert_evaluates()
for module in (model, twin):  # frozen in the middle of the training
    module.into.requires_grad_(False)
    module.blocks[0].requires_grad_(False)
step(*everything)
assert_same(model.state_dict(), twin.state_dict(), "after freezing")

# Nothing but the last layer is trained: the first stages have no gradients at all.
frozen = pair(lambda module: (module.requires_grad_(False), module.head.requires_grad_(True)))
for _ in range(2):
    step(*frozen)
assert_same(frozen[0].state_dict(), frozen[2].state_dict(), "frozen")
"""
)


def test_a_model_with_tied_weights_on_two_ranks(tmp_path):
    run_ranks(LLAMA, num_processes=2, args=[str(tmp_path)], env={"PFEIFE_ENABLED": "true"}, timeout=120).check()
    assert {path.name for path in tmp_path.iterdir()} == {
        "pretrained on all", "model on all", "pretrained on main", "model on main", "pretrained again"
    }  # fmt: skip


def test_frozen_adapted_shared_unused_parameters_and_running_statistics_on_three_ranks(tmp_path):
    env = {"PFEIFE_ENABLED": "true", "PFEIFE_NUM_MICROBATCHES": "4"}
    result = run_ranks(MIXED, num_processes=3, args=[str(tmp_path)], env=env, timeout=120).check()
    held = [line.split()[2:] for line in result.lines("held")]
    assert held == [["True", "True"], ["False", "True"], ["True", "True"]], result.stdout
