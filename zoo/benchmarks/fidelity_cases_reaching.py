"""Scripts that reach for what a pipeline keeps elsewhere: parameters, gradients of inputs, graphs, random states.

A case of what is not there yet says so in `pending`, and runs with `--pending`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fidelity_kit import Run, case, late
from fidelity_models import Encoder
from torch import nn


@case(
    loss="distance of two calls",
)
def the_same_masks_twice(run: Run) -> None:
    """`get_rng_state` and `set_rng_state` around two calls: both draw the same dropout masks."""
    torch.manual_seed(0)
    training = run.module(nn.Sequential(Encoder(depth=2), nn.Dropout(0.5), Encoder(depth=2)))
    for _ in range(3):
        x = torch.randn(8, 16, dtype=run.dtype)
        state = torch.get_rng_state()
        first = training.model(x)
        torch.set_rng_state(state)
        second = training.model(x)
        loss = (first - second).square().sum() + 0 * first.sum()
        training.backward(loss)
        run.record("distance", loss.item())
        training.update()
        torch.manual_seed(7)


@case(model="encoder", loss="mse", ranks=(2, 3))
def moving_average_of_parameters(run: Run) -> None:
    """A moving average over `model.parameters()`, copied into the model for evaluation and back."""
    training = run.fresh("encoder", rate=0.1)
    average = [p.clone().detach() for p in training.model.parameters()]
    for _ in range(3):
        training.step(training.batch())
        with torch.no_grad():
            for mean, parameter in zip(average, training.model.parameters(), strict=True):
                mean.sub_(0.1 * (mean - parameter))
    stored = [p.detach().cpu().clone() for p in training.model.parameters()]
    for mean, parameter in zip(average, training.model.parameters(), strict=True):
        parameter.data.copy_(mean)
    training.evaluate()
    for value, parameter in zip(stored, training.model.parameters(), strict=True):
        parameter.data.copy_(value)
    training.step(training.batch())
    run.record("average", sum(float(mean.sum()) for mean in average))


@case(model="encoder", loss="mse", ranks=(2, 3))
def norm_by_hand(run: Run) -> None:
    """A gradient norm summed over `p.grad` by the script, for its log."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        total = sum(float(p.grad.norm()) ** 2 for p in training.model.parameters() if p.grad is not None)
        run.record("norm", total**0.5)
        training.update(loss)


@case(loss="mse", ranks=(2, 3))
def a_trainable_module_in_front(run: Run) -> None:
    """An unprepared trainable module makes the prepared model's input."""
    torch.manual_seed(0)
    front = nn.Linear(16, 16).to(run.dtype)
    training = run.module(Encoder(depth=4))
    optimizer = torch.optim.SGD(front.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(2, 8, 16, dtype=run.dtype)
        loss = F.mse_loss(training.model(front(x)), y)
        training.backward(loss)
        run.record("front", front.weight.grad)
        training.update(loss)
        optimizer.step()
        optimizer.zero_grad()


@case(model="encoder", loss="mse")
def gradient_of_the_input(run: Run) -> None:
    """Adversarial examples: the gradient with respect to the batch."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        x = batch["x"].clone().requires_grad_(True)
        loss = F.mse_loss(training.model(x), batch["target"])
        training.backward(loss)
        run.record("gradient of the input", x.grad)
        training.update(loss)


@case(model="encoder", loss="two losses, a backward each", ranks=(2, 3))
def two_backwards_through_one_call(run: Run) -> None:
    """`backward(retain_graph=True)` of one loss, then of another, through the same call."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        outputs = training.model(batch["x"])
        first, second = F.mse_loss(outputs, batch["target"]), outputs.abs().mean()
        run.accelerator.backward(first, retain_graph=True)
        run.accelerator.backward(second)
        training.record_gradients()
        run.record("losses", [first.item(), second.item()])
        training.update()


@case(model="encoder", loss="mse", ranks=(2, 3))
def moving_average_of_diffusers(run: Run) -> None:
    """`EMAModel` of diffusers: step, store, copy_to, restore."""
    from diffusers.training_utils import EMAModel

    training = run.fresh("encoder", rate=0.1)
    average = EMAModel(training.model.parameters(), decay=0.8)
    for _ in range(3):
        training.step(training.batch())
        average.step(training.model.parameters())
    average.store(training.model.parameters())
    average.copy_to(training.model.parameters())
    training.evaluate()
    average.restore(training.model.parameters())
    training.step(training.batch())


@case(loss="mse", ranks=(2, 3))
def one_model_feeds_another(run: Run) -> None:
    """A prepared encoder's output, with gradients, is a prepared decoder's input; one optimizer."""
    torch.manual_seed(0)
    first, second = run.accelerator.prepare(Encoder(depth=3).to(run.dtype), Encoder(depth=3).to(run.dtype))
    optimizer = run.accelerator.prepare(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    for _ in range(3):
        x, y = torch.randn(2, 8, 16, dtype=run.dtype)
        loss = F.mse_loss(second(first(x)), y)
        run.accelerator.backward(loss)
        run.record_gradients(first, "first")
        run.record_gradients(second, "second")
        optimizer.step()
        optimizer.zero_grad()


@case(model="llama", loss="causal LM inside")
def embeddings_looked_up_by_the_script(run: Run) -> None:
    """`model.get_input_embeddings()(ids)` outside, then `model(inputs_embeds=...)`."""
    training = run.fresh("llama")
    for _ in range(2):
        batch = training.batch()
        batch["inputs_embeds"] = training.model.get_input_embeddings()(batch.pop("input_ids"))
        training.step(batch)


@case(ranks=(2, 3))
def gradients_of_two_losses_read_by_hand(run: Run) -> None:
    """Each loss's own gradient, by `retain_graph` and zeroing, as in gradient surgery, read late by slow ranks."""
    training = run.module(nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]))
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        x = torch.randn(8, 6, generator=generator, dtype=run.dtype)
        losses = _two_losses(training.model, x)
        found = []
        for loss, retain in zip(losses, (True, False), strict=True):
            run.accelerator.backward(loss, retain_graph=retain)
            if not run.is_last:
                late(0.1)
            found.append([p.grad.clone() for p in training.model.parameters()])
            training.optimizer.zero_grad()
        run.record("products", [float((a * b).sum()) for a, b in zip(*found, strict=True)])
        loss = sum(_two_losses(training.model, x))
        run.accelerator.backward(loss)
        training.update(loss)


def _two_losses(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same two losses."""
    outputs = model(x)
    return outputs.square().mean(), (outputs - x).abs().mean()
