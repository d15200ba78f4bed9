"""What is done with a model, as a plain script would do it, and recorded: losses, gradients, values read.

Nothing in a case's body knows of pipelines. `run.is_last` and `run.is_main` choose who reads a value; in a plain
process both mean that process.
"""

from __future__ import annotations

import time

import equivalence_reading
import torch
import torch.nn.functional as F
from equivalence_kit import CASES, GPIPE, ONE_F_ONE_B, Body, Case, Run, add, case, looped, token_loss
from equivalence_models import build

__all__ = ["CASES", "equivalence_reading"]


# ---------------------------------------------------------------------------------------- models, orders, micro-batches


def _sweep(model: str, steps: int) -> Body:
    def body(run: Run) -> None:
        training = run.prepare(model)
        for _ in range(steps):
            training.step(training.batch())

    return body


ORDERS = {"1f1b": ONE_F_ONE_B, "gpipe": GPIPE, "looped": looped(2)}
MICROBATCHES = (4, 1, 2, 3, 8)  # the plan is made for the first, and serves the others
QUICK_SWEEPS = (
    # model, dtype, order, numbers of micro-batches, numbers of ranks
    *(("llama", "float32", order, MICROBATCHES, (2,)) for order in ORDERS),
    *((model, "float32", "1f1b", (4,), (2,)) for model in ("vit", "resnet", "unet", "bert", "t5")),
    ("llama_tied", "float32", "looped", (4,), (2,)),
    *((model, "float64", "looped", (3, 4), (3,)) for model in ("llama", "vit", "resnet", "unet", "bert", "t5")),
    ("llama_tied", "float64", "1f1b", (4, 3), (3,)),
    ("llama_tied", "float64", "looped", (8, 3), (4,)),
    ("t5", "float64", "1f1b", (4,), (4,)),
    ("unet", "float64", "gpipe", (4,), (4,)),
)


def _add_sweep(
    model: str, dtype: str, order: str, microbatches: int, ranks: tuple[int, ...], *, slow: bool = False
) -> None:
    name = f"{model}-{dtype}-{order}-{microbatches}"
    while name in CASES:
        name += "-again"
    options = {**ORDERS[order], "num_microbatches": microbatches}
    add(Case(name, f"{model}-{dtype}", _sweep(model, 20), ranks, options, getattr(torch, dtype), slow))


def _sweeps() -> None:
    """A quick choice by default; everything with everything when asked for."""
    quick = set()
    for model, dtype, order, numbers, ranks in QUICK_SWEEPS:
        for microbatches in numbers:
            _add_sweep(model, dtype, order, microbatches, ranks)
            quick |= {(model, dtype, order, microbatches, size) for size in ranks}
    for model in ("llama", "llama_tied", "vit", "resnet", "unet", "bert", "t5"):
        for dtype in ("float32", "float64"):
            for order in ORDERS:
                for microbatches in MICROBATCHES:
                    ranks = tuple(n for n in (2, 3, 4) if (model, dtype, order, microbatches, n) not in quick)
                    _add_sweep(model, dtype, order, microbatches, ranks, slow=True)


_sweeps()


# ---------------------------------------------------------------------------------------- labels, batches, lengths


@case()
def one_microbatch_without_labels(run: Run) -> None:
    training = run.prepare("llama")
    for _ in range(3):
        batch = training.batch()
        batch["labels"][2:4] = -100
        training.step(batch)


@case(ranks=(3,))
def short_last_batch(run: Run) -> None:
    training = run.prepare("llama_tied")
    for rows in (8, 6, 8, 3, 8, 1, 8, 2):
        training.step(training.batch(rows))


@case(schedule="looped", num_loops=2, microbatches_per_loop=2, prefetch_forwards=1)
def short_last_batch_looped(run: Run) -> None:
    training = run.prepare("llama")
    for rows in (8, 6, 8, 3, 8, 1, 8):
        training.step(training.batch(rows))


@case(ranks=(3,))
def changing_lengths(run: Run) -> None:
    training = run.prepare("llama")
    for rows, length in ((8, 12), (8, 9), (8, 17), (8, 12), (6, 10), (3, 23), (8, 5), (1, 11)):
        training.step(training.batch(rows, length))


@case(ranks=(2,))
def changing_lengths_t5(run: Run) -> None:
    training = run.prepare("t5")
    for rows, length in ((8, 12), (8, 9), (8, 17), (6, 12), (8, 21)):
        training.step(training.batch(rows, length))


@case(ranks=(3,), schedule="looped", num_loops=2, microbatches_per_loop=2, prefetch_forwards=1)
def changing_lengths_looped(run: Run) -> None:
    training = run.prepare("llama_tied")
    for rows, length in ((8, 12), (8, 9), (8, 17), (5, 12), (8, 21)):
        training.step(training.batch(rows, length))


@case(ranks=(4,), microbatches=None)
def batch_smaller_than_the_number_of_ranks(run: Run) -> None:
    training = run.prepare("llama")
    for rows in (2, 2, 1, 2):
        training.step(training.batch(rows))


# ---------------------------------------------------------------------------------------- losses


@case()
def loss_outside(run: Run) -> None:
    training = run.prepare("llama")
    for _ in range(3):
        batch = training.batch()
        labels = batch.pop("labels")
        outputs = training.model(**batch)
        loss = token_loss(outputs.logits, labels)
        training.backward(loss)
        run.record("logits", outputs.logits)
        training.update(loss)


@case()
def sum_over_counted_tokens(run: Run) -> None:
    training = run.prepare("llama")
    for _ in range(3):
        batch = training.batch()
        labels = batch.pop("labels")
        logits = training.model(**batch).logits
        loss = token_loss(logits, labels, reduction="sum") / (labels[:, 1:] != -100).sum()
        training.backward(loss)
        training.update(loss)


@case()
def number_of_items_given_to_the_model(run: Run) -> None:
    training = run.prepare("llama")
    for step in range(4):
        batch = training.batch()
        count = (batch["labels"][:, 1:] != -100).sum()
        outputs = training.model(**batch, num_items_in_batch=count if step % 2 else int(count))
        training.backward(outputs.loss)
        training.update(outputs.loss)


@case()
def two_losses_added(run: Run) -> None:
    training = run.prepare("llama")
    weight = torch.linspace(0.5, 1.5, 96, dtype=run.dtype)
    for _ in range(3):
        batch = training.batch()
        outputs = training.model(**batch)
        other = token_loss(outputs.logits, batch["labels"], weight=weight, label_smoothing=0.1)
        penalty = outputs.logits.logsumexp(-1).square().mean()
        loss = outputs.loss + 0.5 * other + 1e-3 * penalty
        training.backward(loss)
        run.record("parts", [outputs.loss.item(), other.item(), penalty.item()])
        training.update(loss)


@case()
def loss_divided_by_accumulation_steps(run: Run) -> None:
    training = run.prepare("llama")
    for step in range(6):
        _, loss = training.forward(training.batch())
        loss = loss / 2
        training.backward(loss)
        run.record("loss", loss.item())
        if step % 2:
            training.record_gradients()
            training.update()


@case(ranks=(3,))
def gradient_accumulation(run: Run) -> None:
    run.accelerator.gradient_accumulation_steps = 2
    training = run.prepare("llama_tied")
    for step in range(6):
        with run.accelerator.accumulate(training.model):
            _, loss = training.forward(training.batch())
            training.backward(loss)
            if run.accelerator.sync_gradients:
                training.record_gradients()
                run.record("norm", run.accelerator.clip_grad_norm_(training.model.parameters(), 0.5))
            training.update(loss)
        run.record("synchronises", [step, run.accelerator.sync_gradients])


@case()
def contrastive(run: Run) -> None:
    """A loss that does not separate over the batch: every row is compared with every other."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        embeddings = F.normalize(training.model(batch["x"]), dim=-1)
        loss = F.cross_entropy(embeddings @ embeddings.T / 0.1, torch.arange(8).roll(1))
        training.backward(loss)
        training.update(loss)


@case()
def two_calls_in_one_loss(run: Run) -> None:
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        first, second = training.batch(), training.batch()
        loss = F.mse_loss(training.model(first["x"]), training.model(second["x"]) * 2)
        training.backward(loss)
        training.update(loss)


# ---------------------------------------------------------------------------------------- evaluation, optimizers


@case(ranks=(3,))
def evaluation_between_steps(run: Run) -> None:
    training = run.prepare("llama_tied")
    training.evaluate()
    for step in range(4):
        training.step(training.batch())
        training.evaluate(rows=(8, 5, 1, 8)[step], length=(12, 12, 9, 15)[step])


@case(schedule="looped", num_loops=2, microbatches_per_loop=2, prefetch_forwards=1)
def evaluation_looped(run: Run) -> None:
    training = run.prepare("bert")
    for step in range(3):
        training.step(training.batch())
        training.evaluate(rows=(8, 5, 1)[step])


@case()
def learning_rate_and_counts(run: Run) -> None:
    accelerator = run.accelerator
    kit = build("llama", run.dtype)
    optimizer = torch.optim.SGD(kit.model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = kit.batch(torch.Generator().manual_seed(2), 22, 12)
    samples = [{key: value[i] for key, value in rows.items()} for i in range(22)]
    train = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
    held_out = torch.utils.data.DataLoader(samples, batch_size=8)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(kit.model, optimizer, train, held_out, scheduler)
    for _ in range(2):
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.record("loss", loss.item())
            run.record("rate", scheduler.get_last_lr()[0])
        model.eval()
        seen: list[torch.Tensor] = []
        for batch in held_out:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(-1)
            seen.append(accelerator.gather_for_metrics(predictions))
        model.train()
        run.record("evaluated", sum(len(part) for part in seen))
        run.record("predictions", torch.cat(seen))
    run.record("processes", [accelerator.num_processes, accelerator.process_index, len(train), len(held_out)])


@case(ranks=(2, 3))
def zero_grad_between_an_early_read_and_backward(run: Run) -> None:
    training = run.prepare("llama_tied")
    for step in range(4):
        _, loss = training.forward(training.batch())
        if step != 1 or run.is_main:
            run.record("early", loss.item())
        if step != 2 or run.is_main:
            time.sleep(0.03)
        training.optimizer.zero_grad()
        training.backward(loss)
        run.record("loss", loss.item())
        training.optimizer.step()
        training.step_number += 1


@case()
def gradients_zeroed_in_place(run: Run) -> None:
    training = run.prepare("llama_tied")
    for _ in range(4):
        _, loss = training.forward(training.batch())
        training.optimizer.zero_grad(set_to_none=False)
        training.backward(loss)
        run.record("loss", loss.item())
        training.record_gradients()
        training.optimizer.step()


@case()
def gradients_scaled_by_the_script(run: Run) -> None:
    training = run.prepare("llama_tied")
    for step in range(4):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5 + step)
        training.record_gradients()
        training.update(loss)


@case()
def norms_and_clipping(run: Run) -> None:
    training = run.prepare("llama_tied")
    for _ in range(4):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        run.record("norm", run.accelerator.clip_grad_norm_(training.model.parameters(), 0.1))
        training.record_gradients()
        training.update(loss)
