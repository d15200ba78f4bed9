"""The Trainer of transformers over a pipeline, where the rank that writes checkpoints is slower than the others."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

SCRIPT = """
import os, sys, time
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x, labels):
        outputs = self.layers(x)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}

class Slow(Trainer):
    def _save(self, *args, **kwargs):
        time.sleep(1)
        super()._save(*args, **kwargs)

torch.manual_seed(0)
rows = [{"x": torch.randn(6), "labels": torch.randn(6)} for _ in range(8)]
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=8, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch",
    load_best_model_at_end=True, metric_for_best_model="eval_loss", use_cpu=True, report_to=[], disable_tqdm=True,
    learning_rate=1e-2,
)
trainer = Slow(Net(), arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
print("best", os.path.basename(str(trainer.state.best_model_checkpoint)))
"""


def test_the_best_checkpoint_is_loaded_by_all_ranks_though_one_alone_writes_it(tmp_path):
    result = run_ranks(
        SCRIPT,
        num_processes=2,
        args=(str(tmp_path),),
        env={"PFEIFE_ENABLED": "true", "ACCELERATE_USE_CPU": "true"},
        timeout=120,
    )
    assert result.check().lines("best") == ["best checkpoint-2"] * 2, result.report()
