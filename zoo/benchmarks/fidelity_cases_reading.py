"""Values read before and after backward, by some ranks or by all, in good time or late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fidelity_kit import ONE_F_ONE_B, Body, Case, Run, add, case, late, token_loss

READERS: dict[str, Callable[[Run], bool]] = {
    "everywhere": lambda run: True,
    "on_main": lambda run: run.is_main,
    "on_last": lambda run: run.is_last,
    "on_others": lambda run: not run.is_main or run.size == 1,
}


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
    """All kinds of reading by all kinds of readers; a choice of them is quick."""
    quick = {("item", "on_main"), ("item", "on_others"), ("branch", "everywhere"), ("logits", "on_main"),
             ("scaled", "everywhere"), ("print", "on_last")}  # fmt: skip
    for who, reads in READERS.items():
        for kind in ("item", "print", "branch", "logits", "scaled"):
            for place in ("inside", "outside"):
                if kind in ("print", "branch") and place == "outside":
                    continue
                name = f"{kind}_of_a_loss_{place}_read_early_{who}"
                add(
                    Case(
                        name=name,
                        exercises=f"{kind} read before backward {who.replace('_', ' ')}",
                        body=_early_reader(reads, kind, place == "inside"),
                        plain=name,
                        model="llama",
                        loss="causal LM inside" if place == "inside" else "cross entropy outside",
                        ranks=(2, 3) if kind == "item" else (2,),
                        options={**ONE_F_ONE_B, "num_microbatches": 4},
                        slow=(kind, who) not in quick,
                    )
                )


def _early_reader(reads: Callable[[Run], bool], kind: str, inside: bool) -> Body:
    def body(run: Run) -> None:
        training = run.prepare("llama")
        for step in range(4):
            batch = training.batch()
            labels = batch["labels"] if inside else batch.pop("labels")
            outputs = training.model(**batch)
            loss = outputs.loss if inside else token_loss(outputs.logits, labels)
            if kind != "logits":
                outputs = None  # most scripts keep the loss alone
            if reads(run):
                late(0.05 * (step % 2))  # readers are late, or early
                _read(kind, run, outputs, loss)
            elif step % 3 == 2:
                late(0.05)
            training.backward(loss)
            training.update(loss)

    return body


_add_early_readers()


@case(model="llama", loss="causal LM inside", ranks=(2, 3))
def logits_read_late_on_one_rank(run: Run) -> None:
    """Logits read after backward, by the main or by the last rank alone."""
    training = run.prepare("llama")
    for step in range(4):
        outputs, loss = training.forward(training.batch())
        training.backward(loss)
        if run.is_main if step % 2 else run.is_last:
            run.record("predictions", outputs.logits.argmax(-1))
        training.update(loss)


@case(model="llama", loss="causal LM inside", ranks=(3,))
def running_total(run: Run) -> None:
    """A total of detached losses over steps, read in the end."""
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


@case(model="llama", loss="causal LM inside", ranks=(3,))
def previous_step_read(run: Run) -> None:
    """The step before's loss and logits, read in the next step."""
    training = run.prepare("llama")
    before: Any = None
    for step in range(4):
        outputs, loss = training.forward(training.batch())
        if before is not None and (step % 2 or run.is_main):
            run.record("previous loss", before[1].item())
            run.record("previous logits", before[0].logits)
        training.backward(loss)
        training.update()
        before = (outputs, loss)


@case(model="encoder", loss="mse", ranks=(2, 3))
def losses_read_much_later(run: Run) -> None:
    """All losses kept and read after the evaluation that follows, by all or by the main process."""
    training = run.prepare("encoder", rate=0.1)
    losses = []
    for _ in range(4):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        training.update()
        losses.append(loss)
    training.evaluate()
    if run.is_main:
        run.record("first", losses[0].item())
    run.record("losses", torch.stack([loss.detach() for loss in losses]))


@case(model="unet", loss="mse, gathered before backward")
def gathered_before_backward(run: Run) -> None:
    """`gather(loss.repeat(rows)).mean().item()` before backward."""
    training = run.prepare("unet")
    total = 0.0
    for _ in range(2):
        _, loss = training.forward(training.batch())
        total += run.accelerator.gather(loss.repeat(8)).mean().item() / 2
        training.backward(loss)
        training.update(loss)
    run.record("total", total)


@case(model="llama", loss="causal LM inside", ranks=(3,))
def backward_never_comes(run: Run) -> None:
    """Forward passes whose backward never comes, read by some ranks."""
    training = run.prepare("llama")
    for step in range(3):
        training.step(training.batch())
        _, loss = training.forward(training.batch())
        if (run.is_main, run.is_last)[step % 2]:
            run.record("unused", loss.item())
        del loss
        if step < 2:
            run.accelerator.wait_for_everyone()


@case(model="llama", loss="causal LM inside", ranks=(3,))
def backward_never_comes_before_clipping(run: Run) -> None:
    """An unused forward pass between backward and clipping."""
    training = run.prepare("llama")
    for step in range(3):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        _, unused = training.forward(training.batch())
        if (run.is_main, run.is_last)[step % 2]:
            late(0.05)
            run.record("unused", unused.item())
        del unused
        run.record("norm", run.accelerator.clip_grad_norm_(training.model.parameters(), 0.5))
        training.update(loss)


@case(model="encoder", loss="mse", ranks=(3,))
def unused_forward_read_after_the_parameters_changed(run: Run) -> None:
    """A forward pass read after the optimizer's step has the values of before."""
    training = run.prepare("encoder", rate=0.1)
    for step in range(4):
        _, loss = training.forward(training.batch())
        _, unused = training.forward(training.batch())
        training.backward(loss)
        training.update(loss)
        if step % 2 or run.is_main:
            run.record("unused", unused.item())
            run.record("unused again", (unused * 2).item())


@case(model="loss_only", loss="mse inside", ranks=(3,))
def only_a_loss_returned_and_read_early_on_main(run: Run) -> None:
    """A model that returns its loss alone, read before backward on the main process."""
    training = run.prepare("loss_only", rate=0.1)
    for step in range(4):
        _, loss = training.forward(training.batch())
        if run.is_main:
            late(0.03 * (step % 2))
            run.record("early", loss.item())
        training.backward(loss)
        training.update(loss)


@case(model="llama", loss="causal LM inside", ranks=(2, 3))
def evaluation_without_no_grad_read_on_main(run: Run) -> None:
    """Evaluation with gradients enabled, of which the main process alone reads the values."""
    training = run.prepare("llama")
    training.step(training.batch())
    total = 0.0
    for _ in range(4):
        outputs, loss = training.forward(training.batch())
        if run.is_main:
            total += loss.item() + outputs.logits.mean().item()
    if run.is_main:
        run.record("total", total)
    training.step(training.batch())


def _another_loss_each_step(reads: Callable[[Run], bool]) -> Body:
    def body(run: Run) -> None:
        training = run.prepare("encoder", rate=0.1)
        for step in range(4):
            batch = training.batch()
            _, loss = training.forward(batch)
            if step and reads(run):
                late()  # the others are in `backward` meanwhile
                run.record("early", loss.item())
            training.step_number = 0
            training.backward(loss / (2 + step))
            training.update(loss)

    return body


for _who in ("on_main", "on_last"):
    add(
        Case(
            name=f"another_loss_than_the_one_guessed_read_early_{_who}",
            exercises="the factor of the loss changes at each step, after a read before backward",
            body=_another_loss_each_step(READERS[_who]),
            plain=f"another_loss_than_the_one_guessed_read_early_{_who}",
            model="encoder",
            ranks=(2, 3),
            options={**ONE_F_ONE_B, "num_microbatches": 4},
        )
    )
