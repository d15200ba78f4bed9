"""What scripts do with gradients: accumulate, clip, scale, zero; and with the optimizer's groups."""

from __future__ import annotations

import torch
from fidelity_kit import Run, Training, case, late
from fidelity_models import build


@case(model="llama", loss="causal LM inside, over the number of steps")
def loss_divided_by_accumulation_steps(run: Run) -> None:
    """Accumulation by hand, with a last step that is short."""
    training = run.prepare("llama")
    for step in range(5):
        _, loss = training.forward(training.batch())
        loss = loss / 2
        training.backward(loss)
        run.record("loss", loss.item())
        if step % 2 or step == 4:
            training.record_gradients()
            training.update()


@case(model="llama_tied", loss="causal LM inside", ranks=(3,))
def gradient_accumulation(run: Run) -> None:
    """`accumulate`, with clipping where gradients synchronise."""
    run.accelerator.gradient_accumulation_steps = 2
    training = run.prepare("llama_tied")
    for step in range(4):
        with run.accelerator.accumulate(training.model):
            _, loss = training.forward(training.batch())
            training.backward(loss)
            if run.accelerator.sync_gradients:
                training.record_gradients()
                run.record("norm", run.accelerator.clip_grad_norm_(training.model.parameters(), 0.5))
            training.update(loss)
        run.record("synchronises", [step, run.accelerator.sync_gradients])


@case(model="encoder", loss="mse, gathered before backward")
def gathered_loss_with_accumulation(run: Run) -> None:
    """`gather(loss.repeat(rows)).mean().item()` before backward, under `accumulate`."""
    run.accelerator.gradient_accumulation_steps = 2
    training = run.prepare("encoder", rate=0.1)
    total = 0.0
    for _ in range(4):
        with run.accelerator.accumulate(training.model):
            _, loss = training.forward(training.batch())
            total += run.accelerator.gather(loss.repeat(8)).mean().item() / 2
            run.accelerator.backward(loss)
            if run.accelerator.sync_gradients:
                training.record_gradients()
                run.accelerator.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
        run.record("total", total)


@case(model="encoder", loss="mse")
def not_synchronised(run: Run) -> None:
    """`accelerator.no_sync(model)` around all but the last backward."""
    training = run.prepare("encoder", rate=0.1)
    for step in range(4):
        batch = training.batch()
        if step % 2:
            _, loss = training.forward(batch)
            training.backward(loss / 2)
            training.record_gradients()
            training.update(loss)
        else:
            with run.accelerator.no_sync(training.model):
                _, loss = training.forward(batch)
                training.backward(loss / 2)


@case(model="encoder", loss="mse")
def two_models_accumulate(run: Run) -> None:
    """`accumulate(a, b)`: two models in one loss, each with an optimizer."""
    run.accelerator.gradient_accumulation_steps = 2
    a, b = run.fresh("encoder", rate=0.1), run.fresh("encoder", rate=0.05)
    for _ in range(4):
        with run.accelerator.accumulate(a.model, b.model):
            batch = a.batch()
            loss = (a.model(batch["x"]) * b.model(batch["target"])).square().mean()
            run.accelerator.backward(loss)
            run.record_gradients(a.model, "a")
            run.record_gradients(b.model, "b")
            for training in (a, b):
                training.optimizer.step()
                training.optimizer.zero_grad()
            run.record("loss", loss.item())


@case(model="llama", loss="causal LM inside")
def learning_rate_and_counts(run: Run) -> None:
    """Dataloaders, scheduler and `gather_for_metrics`: rates, numbers of steps, every sample once."""
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


@case(model="llama_tied", loss="causal LM inside", ranks=(2, 3))
def zero_grad_between_an_early_read_and_backward(run: Run) -> None:
    """Gradients are zeroed after the loss was read and before backward, by ranks of different speed."""
    training = run.prepare("llama_tied")
    for step in range(4):
        _, loss = training.forward(training.batch())
        if step != 1 or run.is_main:
            run.record("early", loss.item())
        if step != 2 or run.is_main:
            late()
        training.optimizer.zero_grad()
        training.backward(loss)
        run.record("loss", loss.item())
        training.optimizer.step()
        training.step_number += 1


def _zero(training: Training, way: str) -> None:
    match way:
        case "optimizer":
            training.optimizer.zero_grad()
        case "in place":
            training.optimizer.zero_grad(set_to_none=False)
        case "model":
            training.model.zero_grad()
        case "model in place":
            training.model.zero_grad(set_to_none=False)
        case "by hand":
            for parameter in training.model.parameters():
                parameter.grad = None
        case "by hand in place":
            for parameter in training.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()


@case(model="llama_tied", loss="causal LM inside", ranks=(2, 3))
def gradients_zeroed_in_every_way(run: Run) -> None:
    """By the optimizer, by the model, by hand; set to None and in place; before the forward or before backward."""
    training = run.prepare("llama_tied")
    for i, way in enumerate(("optimizer", "in place", "model", "model in place", "by hand", "by hand in place")):
        if i % 2:
            _zero(training, way)
        _, loss = training.forward(training.batch())
        if i % 2 == 0:
            _zero(training, way)
        training.backward(loss)
        run.record("loss", loss.item())
        training.record_gradients()
        training.optimizer.step()


@case(model="llama_tied", loss="causal LM inside")
def gradients_edited_by_the_script(run: Run) -> None:
    """Every `p.grad` multiplied, replaced or dropped between backward and step."""
    training = run.prepare("llama_tied")
    for step in range(4):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        for name, parameter in training.model.named_parameters():
            if parameter.grad is None:
                continue
            if step == 0:
                parameter.grad.mul_(0.5)
            elif step == 1:
                parameter.grad = parameter.grad * 2 + 0.01 * parameter.detach()
            elif step == 2 and "mlp" in name:
                parameter.grad = None
            else:
                parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
        training.record_gradients()
        training.update(loss)


@case(model="llama_tied", loss="causal LM inside")
def norms_and_clipping(run: Run) -> None:
    """Accelerate's and torch's clipping by norm, of several orders, and by value."""
    training = run.prepare("llama_tied")
    for step in range(6):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        parameters = training.model.parameters()
        match step:
            case 0 | 1:
                run.record("norm", run.accelerator.clip_grad_norm_(parameters, 0.1))
            case 2:
                run.record("norm", torch.nn.utils.clip_grad_norm_(list(parameters), 0.2, norm_type=1))
            case 3:
                run.record("norm", torch.nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=float("inf")))
            case 4:
                run.accelerator.clip_grad_value_(parameters, 0.003)
            case 5:
                torch.nn.utils.clip_grad_value_(parameters, 0.002)
        training.record_gradients()
        training.update(loss)


@case(model="encoder", loss="mse")
def groups_by_name(run: Run) -> None:
    """Two parameter groups by name, one of which is empty on some stage; AdamW with weight decay."""
    kit = build("encoder", run.dtype)
    first = [p for n, p in kit.model.named_parameters() if n.startswith("layers.0")]
    rest = [p for n, p in kit.model.named_parameters() if not n.startswith("layers.0")]
    groups = [{"params": first, "weight_decay": 0.1, "lr": 1e-2}, {"params": rest, "weight_decay": 0.0}]
    model, optimizer = run.accelerator.prepare(kit.model, torch.optim.AdamW(groups, lr=1e-3, eps=1e-3))
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        _, loss = kit.run(model, kit.batch(generator, 8, 12))
        run.accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record("loss", loss.item())
    run.record_weights(model)


@case(model="encoder", loss="mse")
def hooks_on_parameters(run: Run) -> None:
    """`parameter.register_hook` that halves the whole gradient: linear, so it may act on each micro-batch's."""

    def halve(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)

    training = run.fresh("encoder", change=halve, rate=0.1)
    for _ in range(3):
        training.step(training.batch())
    run.record_weights(training.model)
