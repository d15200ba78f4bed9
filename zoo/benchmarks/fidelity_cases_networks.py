"""Several networks in one script: adversaries, teachers and students, targets, adapters in front of frozen models."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from fidelity_kit import Run, case
from fidelity_models import Encoder
from torch import nn


def _data(run: Run, number: int = 1) -> list[torch.Tensor]:
    return list(torch.randn(number, 8, 16, dtype=run.dtype))


@case(loss="binary cross entropy, adversarial")
def adversaries(run: Run) -> None:
    """GAN-like alternation with detach, an optimizer each."""
    torch.manual_seed(0)
    generator = run.module(Encoder(depth=4), rate=0.05)
    discriminator = run.module(nn.Sequential(Encoder(depth=4), nn.Linear(16, 1)), rate=0.05)
    ones, zeros = torch.ones(8, 1, dtype=run.dtype), torch.zeros(8, 1, dtype=run.dtype)
    for _ in range(2):
        noise, real = _data(run, 2)
        made = generator.model(noise).detach()
        real_loss = F.binary_cross_entropy_with_logits(discriminator.model(real), ones)
        loss = real_loss + F.binary_cross_entropy_with_logits(discriminator.model(made), zeros)
        run.accelerator.backward(loss)
        run.record_gradients(discriminator.model, "of the discriminator")
        discriminator.update(loss)


@case(
    loss="binary cross entropy, adversarial",
)
def adversaries_through_each_other(run: Run) -> None:
    """The generator's step of a GAN: gradients flow through the prepared discriminator into the generator."""
    torch.manual_seed(0)
    generator = run.module(Encoder(depth=4), rate=0.05)
    discriminator = run.module(nn.Sequential(Encoder(depth=4), nn.Linear(16, 1)), rate=0.05)
    ones = torch.ones(8, 1, dtype=run.dtype)
    for _ in range(2):
        made = generator.model(_data(run)[0])
        loss = F.binary_cross_entropy_with_logits(discriminator.model(made), ones)
        run.accelerator.backward(loss)
        run.record_gradients(generator.model, "of the generator")
        generator.update(loss)
        discriminator.optimizer.zero_grad()


@case(loss="mse")
def two_models_with_one_optimizer(run: Run) -> None:
    """Two prepared models, one optimizer over both, both in one loss."""
    torch.manual_seed(0)
    a, b = run.accelerator.prepare(Encoder(depth=4).to(run.dtype), Encoder(depth=3).to(run.dtype))
    optimizer = run.accelerator.prepare(torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1, momentum=0.9))
    for _ in range(3):
        x, y = _data(run, 2)
        loss = F.mse_loss(a(x), b(y)) + a(y).square().mean()
        run.accelerator.backward(loss)
        run.record("norm", run.accelerator.clip_grad_norm_([*a.parameters(), *b.parameters()], 0.3))
        run.record_gradients(a, "a")
        run.record_gradients(b, "b")
        optimizer.step()
        optimizer.zero_grad()
        run.record("loss", loss.item())


@case(loss="mse to a target network's output", ranks=(2, 3))
def four_networks(run: Run) -> None:
    """Policy, two critics and a target under no_grad, updated by a moving average through state dicts."""
    torch.manual_seed(0)
    policy, first, second = (run.module(Encoder(depth=3), rate=0.05) for _ in range(3))
    target = Encoder(depth=3).to(run.dtype)
    target.load_state_dict(policy.model.state_dict())
    target = run.accelerator.prepare(target)
    for _ in range(3):
        x, y = _data(run, 2)
        with torch.no_grad():
            wanted = target(y) * 0.9
        loss = F.mse_loss(first.model(x), wanted) + F.mse_loss(second.model(x), wanted)
        run.accelerator.backward(loss)
        for critic in (first, second):
            critic.update()
        policy_loss = F.mse_loss(policy.model(x), torch.minimum(first.model(x), second.model(x)).detach())
        run.accelerator.backward(policy_loss)
        policy.update(policy_loss)
        mine, theirs = target.state_dict(), policy.model.state_dict()
        target.load_state_dict({name: 0.9 * mine[name] + 0.1 * theirs[name] for name in mine})
        run.record("loss", loss.item())
        run.record("target", sum(float(value.sum()) for value in target.state_dict().values()))


class Control(nn.Module):
    """Makes a list of residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """A residual for each layer of the frozen network."""
        residuals = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            residuals.append(x * 0.1)
        return residuals


class Steered(nn.Module):
    """A network that takes residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, residuals: list[torch.Tensor]) -> torch.Tensor:
        """Hidden states."""
        for layer, residual in zip(self.layers, residuals, strict=True):
            x = torch.tanh(layer(x)) + residual
        return x


@case(loss="mse through a frozen network", ranks=(2, 3))
def a_frozen_network_behind(run: Run) -> None:
    """A prepared model's list of residuals goes into a frozen unprepared network, gradients flow through it."""
    torch.manual_seed(0)
    frozen = Steered().to(run.dtype).requires_grad_(False)
    training = run.module(Control())
    for _ in range(3):
        x, y = _data(run, 2)
        loss = F.mse_loss(frozen(x, training.model(x)), y)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(loss="distillation")
def teacher_follows_the_student(run: Run) -> None:
    """`teacher.load_state_dict(student.state_dict())` every step; the teacher's output is a constant."""
    torch.manual_seed(0)
    student = run.module(Encoder(depth=4))
    teacher = copy.deepcopy(run.accelerator.unwrap_model(student.model)).requires_grad_(False).eval()
    for _ in range(3):
        x, y = _data(run, 2)
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.mse_loss(student.model(x), wanted + 0.1 * y)
        student.backward(loss)
        student.update(loss)
        teacher.load_state_dict(student.model.state_dict())
        run.record("teacher", sum(float(p.sum()) for p in teacher.parameters()))


@case(loss="mse with a head outside", ranks=(2, 3))
def a_trainable_head_outside(run: Run) -> None:
    """An unprepared head behind the model, trained by an optimizer of its own."""
    torch.manual_seed(0)
    head = nn.Linear(16, 3).to(run.dtype)
    training = run.module(Encoder(depth=4))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(3):
        x, y = _data(run, 2)
        loss = F.mse_loss(head(training.model(x)), y[:, :3])
        training.backward(loss)
        run.record("head", head.weight.grad)
        training.update(loss)
        optimizer.step()
        optimizer.zero_grad()


@case(loss="mse of two conditional calls", ranks=(2,))
def classifier_free_guidance(run: Run) -> None:
    """A call on the batch twice over, split and recombined outside, as in guided diffusion."""
    torch.manual_seed(0)
    training = run.module(Encoder(depth=4))
    for _ in range(3):
        x, y = _data(run, 2)
        both = training.model(torch.cat([x, torch.zeros_like(x)]))
        conditional, unconditional = both.chunk(2)
        loss = F.mse_loss(unconditional + 1.5 * (conditional - unconditional), y)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(loss="mse", slow=True)
def many_models_in_one_process(run: Run) -> None:
    """A new model for each fold of a cross-validation, many times over."""
    for fold in range(35):
        torch.manual_seed(fold)
        training = run.module(Encoder(depth=2))
        x, y = _data(run, 2)
        loss = F.mse_loss(training.model(x), y)
        training.backward(loss)
        training.update(loss)
        with torch.no_grad():
            run.record("evaluated", training.model(x).sum().item())


class _Scaled(nn.Module):
    def __init__(self, scale: float, eps: float) -> None:
        super().__init__()
        self.encoder, self.norm = Encoder(depth=4), nn.LayerNorm(16, eps=eps)
        self.scale = scale

    def forward(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        y = self.norm(self.encoder(x)) * self.scale
        return torch.tanh(y * gain) if self.scale < 1 else y * gain


@case(loss="mse to a teacher's output and to a target")
def one_class_with_other_numbers(run: Run) -> None:
    """Teacher and student of one class whose attributes are other floats, and a float argument that changes."""
    torch.manual_seed(0)
    student, teacher = run.module(_Scaled(0.5, 1e-5)), run.module(_Scaled(2.0, 1e-6))
    for step in range(3):
        x, y = (value[: 8 - step] for value in _data(run, 2))
        made, wanted = student.model(x, gain=1 + step / 4), teacher.model(x)
        loss = F.mse_loss(made, wanted.detach()) + F.mse_loss(wanted, y)
        run.accelerator.backward(loss)
        run.record_gradients(student.model, "of the student")
        student.update(loss)
        teacher.update(loss)
