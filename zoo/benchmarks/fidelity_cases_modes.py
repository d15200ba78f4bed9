"""Training and evaluation modes, buffers that forward changes, and normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fidelity_kit import LOOPED, Run, Training, case
from torch import nn

_MICROBATCHES = "accumulation over the same micro-batches"


@case(model="llama_tied", loss="causal LM inside", ranks=(3,))
def evaluation_between_steps(run: Run) -> None:
    """Evaluation first, then training and evaluation in turn, on other numbers of rows and lengths."""
    training = run.prepare("llama_tied")
    training.evaluate()
    for step in range(2):
        training.step(training.batch())
        training.evaluate(rows=(5, 8)[step], length=(12, 9)[step])


@case(model="bert", loss="classification inside", **LOOPED)
def evaluation_looped(run: Run) -> None:
    """Training and evaluation in turn in the looped order."""
    training = run.prepare("bert")
    for step in range(2):
        training.step(training.batch())
        training.evaluate(rows=(8, 5)[step])


class Backbone(nn.Module):
    """Convolutions with BatchNorm, and a head with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for i in range(4)
        )
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((2, 3))))


def _classify(run: Run, training: Training, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(8, 3, 8, 8, generator=generator, dtype=run.dtype)
        y = torch.randint(0, 10, (8,), generator=generator)
        loss = F.cross_entropy(training.model(x), y)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(loss="cross entropy")
def frozen_normalisation_in_a_training_model(run: Run) -> None:
    """`model.train()`, then BatchNorm and dropout put into `eval()`, module by module."""
    torch.manual_seed(0)
    training = run.module(Backbone())
    training.model.train()
    for module in training.model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout):
            module.eval()
    _classify(run, training)
    run.record("modes", [module.training for module in training.model.modules()])
    training.model.train()
    training.model.eval()
    _classify(run, training, steps=1)


@case(loss="cross entropy")
def frozen_backbone(run: Run) -> None:
    """A frozen backbone in eval mode in front of a training head."""
    torch.manual_seed(0)
    model = Backbone()
    model.blocks.requires_grad_(False)
    training = run.module(model)
    training.model.blocks.eval()
    training.model.dropout.eval()
    _classify(run, training)
    run.record_weights(training.model)


def _batch_norm_reference(run: Run) -> None:
    torch.manual_seed(0)
    _batch_norm(run, microbatches=4)


def _batch_norm(run: Run, microbatches: int) -> None:
    model = Backbone()
    model.dropout.eval()
    training = run.module(model)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        x = torch.randn(8, 3, 8, 8, generator=generator, dtype=run.dtype)
        y = torch.randint(0, 10, (8,), generator=generator)
        total = 0.0
        for rows, labels in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            loss = F.cross_entropy(training.model(rows), labels) / microbatches
            run.accelerator.backward(loss)
            total += loss.item()
        training.record_gradients()
        training.update()
        run.record("loss", total)
    state = training.model.state_dict()
    run.record("buffers", [value.clone() for name, value in state.items() if "running" in name or "tracked" in name])


@case(loss="cross entropy", ranks=(2, 3), reference=_batch_norm_reference, stated=_MICROBATCHES)
def batch_norm_in_training_mode(run: Run) -> None:
    """BatchNorm in training mode, its running statistics in the state dict."""
    torch.manual_seed(0)
    _batch_norm(run, microbatches=1)


class Counting(nn.Module):
    """Changes buffers in forward: a counter, and a running mean of its inputs if that is wanted."""

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16) if mean else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        if self.training:
            self.seen += 1
            if self.mean is not None:
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _counting(run: Run, microbatches: int, *, mean: bool) -> None:
    torch.manual_seed(0)
    training = run.module(Counting(mean=mean))
    for _ in range(3):
        for rows in torch.randn(8, 16, dtype=run.dtype).chunk(microbatches):
            run.accelerator.backward(training.model(rows).square().mean() / microbatches)
        training.record_gradients()
        training.update()
    run.record(
        "buffers", [value.clone() for name, value in training.model.state_dict().items() if name in ("seen", "mean")]
    )


@case(loss="mean of squares", reference=lambda run: _counting(run, 4, mean=False), stated=_MICROBATCHES)
def a_counter_in_forward(run: Run) -> None:
    """A counter that forward changes in place."""
    _counting(run, 1, mean=False)


@case(loss="mean of squares")
def a_running_mean_in_forward(run: Run) -> None:
    """A running mean over the batch that forward keeps in a buffer by hand."""
    _counting(run, 1, mean=True)


@case(model="encoder", loss="mse", ranks=(3,))
def alternating_modes(run: Run) -> None:
    """`train()` and `eval()` in turn at every step, evaluation by `inference_mode` too."""
    training = run.prepare("encoder", rate=0.1)
    for step in range(4):
        training.model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            batch = training.batch(rows=(8, 3, 1, 8)[step])
            run.record("evaluated", training.model(batch["x"]).sum().item())
        training.model.train()
        training.step(training.batch())


class WithAuxiliary(nn.Module):
    """Adds up an auxiliary loss on the way, as mixtures of experts do, and returns it beside the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(16, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
        """Outputs, and losses if there is a target."""
        auxiliary = x.new_zeros(())
        for layer, gate in zip(self.layers, self.gates, strict=True):
            weights = gate(x).softmax(-1)
            auxiliary = auxiliary + weights.mean(0).square().sum()
            x = torch.tanh(layer(x)) * weights[:, :1]
        loss = None if y is None else F.mse_loss(x, y) + 0.1 * auxiliary
        return {"loss": loss, "auxiliary": auxiliary, "outputs": x}


@case(loss="mse with an auxiliary loss inside", ranks=(2, 3))
def auxiliary_loss_inside(run: Run) -> None:
    """A balancing loss of every layer, which does not separate over the batch, added inside the model."""
    torch.manual_seed(0)
    training = run.module(WithAuxiliary())
    for _ in range(3):
        x, y = torch.randn(2, 8, 16, dtype=run.dtype)
        outputs = training.model(x, y)
        training.backward(outputs["loss"])
        training.record_gradients()
        run.record("auxiliary", outputs["auxiliary"].item())
        training.update(outputs["loss"])


class Penalised(nn.Module):
    """Adds a penalty that is a mean over rows, and one on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        penalty = x.new_zeros(())
        for layer in self.layers:
            x = torch.tanh(layer(x))
            penalty = penalty + x.square().mean()
        return F.mse_loss(x, y) + 0.1 * penalty


@case(loss="mse with penalties on activations inside", ranks=(2, 3))
def penalty_inside(run: Run) -> None:
    """Penalties on every layer's activations, means over the batch, added inside the model."""
    torch.manual_seed(0)
    training = run.module(Penalised())
    for _ in range(3):
        x, y = torch.randn(2, 8, 16, dtype=run.dtype)
        loss = training.model(x, y)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)
