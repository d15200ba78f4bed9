"""What is done with a model, as a plain script would do it, and recorded: losses, gradients, values read.

Nothing in a case's body knows of pipelines. `run.is_last` and `run.is_main` choose who reads a value; in a plain process
both mean that process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from equivalence_models import Batch, Kit, build

Options = dict[str, Any]
GPIPE: Options = {"schedule": "gpipe"}
ONE_F_ONE_B: Options = {"schedule": "1f1b"}


def looped(microbatches_per_loop: int) -> Options:
    """The looped order with two stages a rank and a prefetched forward."""
    return {
        "schedule": "looped",
        "num_loops": 2,
        "microbatches_per_loop": microbatches_per_loop,
        "prefetch_forwards": 1,
    }


class Models:
    """Prepared models. Cases with equal options share one, which spares the capture, and start from equal parameters."""

    def __init__(self) -> None:
        self.options: Options = {}
        self._made: dict[Any, tuple[Kit, list[torch.Tensor]]] = {}

    def get(self, accelerator: Accelerator, name: str, dtype: torch.dtype) -> Kit:
        """The prepared model of that name, as it was when it was built."""
        order = {option: value for option, value in self.options.items() if option != "num_microbatches"}
        key = (name, dtype, *sorted(order.items()))
        if key not in self._made:
            kit = build(name, dtype)
            accelerator.prepare(kit.model)
            self._made[key] = (kit, [parameter.detach().clone() for parameter in kit.model.parameters()])
        kit, first = self._made[key]
        with torch.no_grad():
            for parameter, value in zip(kit.model.parameters(), first, strict=True):
                parameter.grad = None
                if not parameter.is_meta:
                    parameter.copy_(value)
        return kit


@dataclass
class Run:
    """One run of a case in one process."""

    accelerator: Accelerator
    dtype: torch.dtype
    rank: int
    size: int
    models: Models
    records: dict[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float64

    def record(self, name: str, value: Any) -> None:
        """Note a value that must be the same in every process that notes it; reads it now."""
        value = torch.from_numpy(value.detach().numpy().copy()) if isinstance(value, torch.Tensor) else value
        self.records.setdefault(name, []).append(value)

    def prepare(self, name: str, *, optimizer: str | None = None, rate: float = 1e-2) -> Training:
        """The model of that name and an optimizer, prepared."""
        kit = self.models.get(self.accelerator, name, self.dtype)
        parameters = kit.model.parameters()
        # Adam divides by gradients' sizes and so amplifies what reordered sums differ by; float64 is to show exactness.
        if optimizer == "adamw" or (optimizer is None and not self.exact):
            made: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        else:
            made = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        return Training(self, kit, kit.model, self.accelerator.prepare(made))


class Training:
    """A prepared model and its optimizer, with the lines that most scripts share."""

    def __init__(self, run: Run, kit: Kit, model: Any, optimizer: Any) -> None:
        self.run = run
        self.kit = kit
        self.model = model
        self.optimizer = optimizer
        self.generator = torch.Generator().manual_seed(7)
        self.step_number = 0

    def batch(self, rows: int = 8, length: int = 12) -> Batch:
        return self.kit.batch(self.generator, rows, length)

    def forward(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        return self.kit.run(self.model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        self.run.accelerator.backward(loss)
        if self.step_number == 0:
            self.record_gradients()

    def record_gradients(self) -> None:
        """Each rank records those of its own parameters."""
        found = {n: p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.run.record("gradients", found)

    def update(self, loss: Any = None) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        if loss is not None:
            self.run.record("loss", loss.item())

    def step(self, batch: Batch) -> None:
        _, loss = self.forward(batch)
        self.backward(loss)
        self.update(loss)

    def evaluate(self, rows: int = 8, length: int = 12) -> None:
        self.model.eval()
        with torch.no_grad():
            outputs, loss = self.forward(self.kit.batch(torch.Generator().manual_seed(3), rows, length))
        self.run.record("evaluation loss", loss)
        self.run.record("evaluation", outputs.logits if hasattr(outputs, "logits") else outputs)
        self.model.train()


Body = Callable[[Run], None]


@dataclass(frozen=True)
class Case:
    """A case by name. Cases with an equal `plain` do the same in a plain process, which is run once for all of them."""

    name: str
    plain: str
    body: Body
    ranks: tuple[int, ...]
    options: Options
    dtype: torch.dtype = torch.float32
    slow: bool = False


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    assert case.name not in CASES, case.name
    CASES[case.name] = case


def case(
    *, ranks: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float64, microbatches: int | None = 4, **options: Any
) -> Callable[[Body], Body]:
    """Register a function as a case under its own name."""
    if microbatches is not None:
        options["num_microbatches"] = microbatches

    def register(body: Body) -> Body:
        add(Case(body.__name__, body.__name__, body, ranks, {"schedule": "1f1b", **options}, dtype))
        return body

    return register


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


def token_loss(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


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


# ---------------------------------------------------------------------------------------- reading early


def _readers() -> Iterator[tuple[str, Callable[[Run], bool]]]:
    yield "everywhere", lambda run: True
    yield "on_main", lambda run: run.is_main
    yield "on_last", lambda run: run.is_last
    yield "on_others", lambda run: not run.is_main or run.size == 1


def _read(kind: str, run: Run, outputs: Any, loss: torch.Tensor) -> None:
    match kind:
        case "item":
            run.record("early", loss.item())
        case "print":
            run.record("early", f"{loss:.9f}"[:8])
        case "branch":
            run.record("early", "nan" if torch.isnan(loss) else "number")
        case "logits":
            run.record("early", outputs.logits.argmax(-1))
        case "scaled":
            run.record("early", (loss.detach().float() * 2).item())


def _add_early_readers() -> None:
    for who, reads in _readers():
        for kind in ("item", "print", "branch", "logits", "scaled"):
            for place in ("inside", "outside"):
                if kind in ("print", "branch") and place == "outside":
                    continue
                name = f"{kind}_of_a_loss_{place}_read_early_{who}"
                ranks = (2, 3) if kind == "item" else (2,)
                body = _early_reader(reads, kind, place == "inside")
                add(Case(name, name, body, ranks, {**ONE_F_ONE_B, "num_microbatches": 4}, torch.float64))


def _early_reader(reads: Callable[[Run], bool], kind: str, inside: bool) -> Body:
    def body(run: Run) -> None:
        training = run.prepare("llama")
        for step in range(6):
            batch = training.batch()
            labels = batch["labels"] if inside else batch.pop("labels")
            outputs = training.model(**batch)
            loss = outputs.loss if inside else token_loss(outputs.logits, labels)
            if kind != "logits":
                outputs = None  # most scripts keep the loss alone
            if reads(run):
                time.sleep(0.05 * (step % 2))  # readers are late, or early
                _read(kind, run, outputs, loss)
            elif step % 3 == 2:
                time.sleep(0.05)
            training.backward(loss)
            training.update(loss)

    return body


_add_early_readers()


@case(ranks=(2, 3))
def logits_read_late_on_one_rank(run: Run) -> None:
    training = run.prepare("llama")
    for step in range(4):
        outputs, loss = training.forward(training.batch())
        training.backward(loss)
        if run.is_main if step % 2 else run.is_last:
            run.record("predictions", outputs.logits.argmax(-1))
        training.update(loss)


@case(ranks=(3,))
def running_total(run: Run) -> None:
    training = run.prepare("llama")
    total: Any = 0
    for step in range(4):
        _, loss = training.forward(training.batch())
        if step < 2:
            total += loss.detach().float()
        training.backward(loss)
        if step >= 2:
            total += loss.detach().float()
        training.update()
    run.record("total", float(total))


@case(ranks=(3,))
def previous_step_read(run: Run) -> None:
    training = run.prepare("llama")
    before: Any = None
    for step in range(5):
        outputs, loss = training.forward(training.batch())
        if before is not None and (step % 2 or run.is_main):
            run.record("previous loss", before[1].item())
            run.record("previous logits", before[0].logits)
        training.backward(loss)
        training.update()
        before = (outputs, loss)


@case()
def gathered_before_backward(run: Run) -> None:
    training = run.prepare("unet")
    total = 0.0
    for _ in range(3):
        _, loss = training.forward(training.batch())
        total += run.accelerator.gather(loss.repeat(8)).mean().item() / 2
        training.backward(loss)
        training.update(loss)
    run.record("total", total)


@case(ranks=(3,))
def backward_never_comes(run: Run) -> None:
    training = run.prepare("llama")
    for step in range(4):
        training.step(training.batch())
        _, loss = training.forward(training.batch())
        if (run.is_main, run.is_last)[step % 2]:
            run.record("unused", loss.item())
        del loss
        if step < 2:
            run.accelerator.wait_for_everyone()


@case(ranks=(3,))
def backward_never_comes_before_clipping(run: Run) -> None:
    training = run.prepare("llama")
    for step in range(4):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        _, unused = training.forward(training.batch())
        if (run.is_main, run.is_last)[step % 2]:
            time.sleep(0.05)
            run.record("unused", unused.item())
        del unused
        run.record("norm", run.accelerator.clip_grad_norm_(training.model.parameters(), 0.5))
        training.update(loss)


@case(ranks=(3,))
def unused_forward_read_after_the_parameters_changed(run: Run) -> None:
    training = run.prepare("encoder", rate=0.1)
    for step in range(4):
        _, loss = training.forward(training.batch())
        _, unused = training.forward(training.batch())
        training.backward(loss)
        training.update(loss)
        if step % 2 or run.is_main:
            run.record("unused", unused.item())
            run.record("unused again", (unused * 2).item())


@case(ranks=(3,))
def only_a_loss_returned_and_read_early_on_main(run: Run) -> None:
    training = run.prepare("loss_only", rate=0.1)
    for step in range(6):
        _, loss = training.forward(training.batch())
        if run.is_main:
            time.sleep(0.03 * (step % 2))
            run.record("early", loss.item())
        training.backward(loss)
        training.update(loss)


@case(ranks=(2, 3))
def evaluation_without_no_grad_read_on_main(run: Run) -> None:
    training = run.prepare("llama")
    training.step(training.batch())
    total = 0.0
    for _ in range(8):
        outputs, loss = training.forward(training.batch())
        if run.is_main:
            total += loss.item() + outputs.logits.mean().item()
    if run.is_main:
        run.record("total", total)
    training.step(training.batch())


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
