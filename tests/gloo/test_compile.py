"""Stages compiled on all ranks, against the same models in one process."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

SMALL = """
import copy
import torch
from torch import nn
from accelerate import Accelerator
from torch._dynamo.utils import counters
from pfeife_accelerate import PfeifePlugin

options = dict(num_microbatches=2, schedule="1f1b", split_points=["2"], compile="aot_eager")
accelerator = Accelerator(pfeife_plugin=PfeifePlugin(**options))
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
model = accelerator.prepare(copy.deepcopy(plain))
worst, counts = 0.0, []
for rows in (4, 4, 6, 8):
    x = torch.randn(rows, 6)
    loss = model(x).square().mean()
    accelerator.backward(loss)
    plain(x).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters()):
        if not mine.is_meta:
            worst = max(worst, (mine.grad - other.grad).abs().max().item())
    counts.append(counters["aot_autograd"]["ok"])
print(f"worst {worst:.2e} counts {counts}\\n", end="", flush=True)
"""


def test_each_rank_compiles_its_stage():
    lines = run_ranks(SMALL, num_processes=2, timeout=120).check().lines("worst")
    assert len(lines) == 2
    for line in lines:
        worst, counts = float(line.split()[1]), line.partition("counts ")[2]
        assert worst < 1e-6, line
        assert counts == "[1, 1, 2, 2]", "once for the first size, once for all others"


MODELS = """
import copy
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification
from pfeife_accelerate import PfeifePlugin

# Accelerate's own option, without one of ours.
accelerator = Accelerator(
    pfeife_plugin=PfeifePlugin(num_microbatches=2, schedule="1f1b"),
    dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True),
)
torch.manual_seed(0)
llama = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
)
resnet = ResNetForImageClassification(
    ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3,
                 problem_type="single_label_classification")
)
plain = [copy.deepcopy(llama), copy.deepcopy(resnet)]
models = accelerator.prepare(llama, resnet)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in plain]
prepared = [accelerator.prepare(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]


def batches():
    torch.manual_seed(1)
    for rows, length in ((4, 8), (4, 8), (2, 8), (4, 12), (4, 10), (4, 6)):
        ids = torch.randint(0, 50, (rows, length))
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for rows in (4, 4):
        yield {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.arange(rows) % 3}


def compiled():
    return counters["aot_autograd"]["ok"]


worst, counts = 0.0, []
for batch in batches():
    which = int("pixel_values" in batch)
    loss = models[which](**batch).loss
    accelerator.backward(loss)
    found = loss.item()
    if which == 0:
        expected = plain[0](**batch).loss
        expected.backward()
        wanted = expected.item()
    else:  # BatchNorm sees micro-batches
        wanted = 0.0
        for half in (slice(0, 2), slice(2, 4)):
            part = plain[1](**{name: value[half] for name, value in batch.items()}).loss / 2
            part.backward()
            wanted += part.item()
    worst = max(worst, abs(found - wanted) / abs(wanted))
    for mine, other in zip(models[which].parameters(), plain[which].parameters()):
        if not mine.is_meta:
            worst = max(worst, ((mine.grad - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-3)).item())
    for optimizer in (prepared[which], optimizers[which]):
        optimizer.step()
        optimizer.zero_grad()
    counts.append(compiled())
models[0].eval(), plain[0].eval()
with torch.no_grad():
    logits = models[0](batch_ids := torch.arange(20).reshape(2, 10)).logits
    worst = max(worst, (logits - plain[0](batch_ids).logits).abs().max().item())
counts.append(compiled())
print(f"worst {worst:.2e} counts {counts}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_a_llama_and_a_resnet_compiled_on_two_ranks():
    result = run_ranks(MODELS, num_processes=2, timeout=270).check()
    lines = result.lines("worst")
    assert len(lines) == 2, result.report()
    for line in lines:
        worst, counts = float(line.split()[1]), eval(line.partition("counts ")[2])
        assert worst < 1e-4, line
        per_graph = counts[0]
        assert per_graph > 0
        assert counts[1] == counts[0], "later micro-batches and steps of equal shape are not compiled again"
        assert counts[2] <= 2 * per_graph, "a short batch: once more"
        assert counts[3] <= 3 * per_graph, "another length: once more"
        assert counts[5] == counts[4] == counts[3], "and then no more"
        assert counts[7] == counts[6] > counts[5], "the second model's stages"
        assert counts[8] > counts[7], "evaluation"
