"""Every model with every order of the schedule: plain training steps, and nothing else."""

from __future__ import annotations

import torch
from fidelity_kit import CASES, GPIPE, LOOPED, ONE_F_ONE_B, Body, Case, Run, add

ORDERS = {"1f1b": ONE_F_ONE_B, "gpipe": GPIPE, "looped": LOOPED}
LOSSES = {
    "llama": "causal LM inside, -100 unevenly",
    "llama_tied": "causal LM inside, -100 unevenly",
    "vit": "cross entropy, label smoothing",
    "resnet": "cross entropy, label smoothing",
    "unet": "mse to noise",
    "bert": "classification inside",
    "t5": "sequence to sequence inside",
    "clip": "contrastive inside",
    "whisper": "sequence to sequence inside",
}
EXERCISES = {
    "llama": "rotary tables and a mask that cross all stages",
    "llama_tied": "tied embeddings on the first and the last rank",
    "vit": "a plain tensor returned",
    "resnet": "convolutions, BatchNorm in eval mode",
    "unet": "skips over several stages, nested inputs",
    "bert": "an encoder with a head",
    "t5": "encoder, decoder, shared embeddings and position tables",
    "clip": "two towers",
    "whisper": "convolutions, encoder, decoder, tied head",
}
QUICK = (
    # model, dtype, order, numbers of micro-batches, numbers of ranks, steps
    ("llama", "float32", "1f1b", (4, 1, 3), (2,), 4),
    ("llama", "float64", "looped", (8, 3), (3,), 20),
    ("llama_tied", "float64", "1f1b", (3,), (3,), 4),
    ("llama_tied", "float64", "looped", (8,), (4,), 4),
    ("vit", "float32", "gpipe", (4,), (2,), 20),
    ("resnet", "float32", "1f1b", (4,), (2,), 4),
    ("bert", "float64", "looped", (3,), (2,), 4),
    ("t5", "float64", "1f1b", (4,), (3,), 4),
    ("clip", "float64", "1f1b", (4,), (2,), 3),
    ("whisper", "float64", "1f1b", (4,), (2,), 3),
)


def _steps(model: str, steps: int) -> Body:
    def body(run: Run) -> None:
        training = run.prepare(model)
        for _ in range(steps):
            training.step(training.batch())

    return body


def _add(model: str, dtype: str, order: str, micro: int, ranks: tuple[int, ...], steps: int, *, slow: bool) -> None:
    name = f"{model}-{dtype}-{order}-{micro}" + ("-long" if steps == 20 and slow else "")
    add(
        Case(
            name=name,
            exercises=EXERCISES[model],
            body=_steps(model, steps),
            plain=f"{model}-{dtype}-{steps}",
            model=model,
            loss=LOSSES[model],
            ranks=ranks,
            options={**ORDERS[order], "num_microbatches": micro},
            dtype=getattr(torch, dtype),
            slow=slow,
        )
    )


def _sweep() -> None:
    """A quick choice by default; every model, order and number of ranks when asked for."""
    for model, dtype, order, numbers, ranks, steps in QUICK:
        for micro in numbers:
            _add(model, dtype, order, micro, ranks, steps, slow=False)
    _add("unet", "float64", "gpipe", 3, (4,), 2, slow=True)
    for model in LOSSES:
        for order in ORDERS:
            _add(model, "float64", order, 3, (2, 3, 4), 20, slow=True)
        _add(model, "float32", "1f1b", 4, (2, 3, 4), 20, slow=True)


_sweep()
__all__ = ["CASES"]
