"""Models that are hard to capture: checkpointing, breaks in the graph, Functions of their own, rows that mix.

A case of what is not there yet says so in `pending`, and runs with `--pending`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fidelity_kit import Run, case
from fidelity_models import Encoder
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """Blocks under checkpointing."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def _fit(run: Run, module: nn.Module, steps: int = 3, scales: tuple[float, ...] = (1.0,)) -> None:
    training = run.module(module)
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        x, y = torch.randn(2, 8, 16, generator=generator, dtype=run.dtype) * scales[step % len(scales)]
        loss = F.mse_loss(training.model(x), y)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(loss="mse", ranks=(2, 3))
def checkpointed_blocks(run: Run) -> None:
    """`torch.utils.checkpoint` around the blocks of a module."""
    torch.manual_seed(0)
    _fit(run, Checkpointed())


@case(model="llama", loss="causal LM inside", ranks=(2, 3))
def checkpointed_llama(run: Run) -> None:
    """`gradient_checkpointing_enable()`."""
    training = run.fresh("llama", change=lambda model: model.gradient_checkpointing_enable())  # type: ignore[operator]
    for _ in range(3):
        training.step(training.batch())


@case(model="llama", loss="causal LM inside")
def checkpointed_adapters(run: Run) -> None:
    """Checkpointing with LoRA and a frozen base: `enable_input_require_grads`."""
    from peft import LoraConfig, get_peft_model

    def adapt(model: Any) -> nn.Module:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(model, config).to(run.dtype)

    training = run.fresh("llama", change=adapt, rate=0.1)
    for _ in range(3):
        training.step(training.batch())


class Reentrant(Checkpointed):
    """Blocks under the older kind of checkpointing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x


@case(loss="mse")
def checkpointed_with_reentry(run: Run) -> None:
    """`checkpoint(..., use_reentrant=True)`."""
    torch.manual_seed(0)
    _fit(run, Reentrant())


class Breaking(nn.Module):
    """Looks at a value in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = Encoder(depth=3), Encoder(depth=3), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        x = self.first(x)
        if float(x.detach().abs().mean()) > 0.18:
            x = self.other(x)
        return self.second(x)


@case(loss="mse", ranks=(2, 3))
def control_flow_by_values(run: Run) -> None:
    """A branch on a value in the middle of forward, taken in some steps; in it a layer of its own."""
    torch.manual_seed(0)
    module = Breaking()
    _fit(run, module, steps=6, scales=(0.1, 3.0, 0.1))
    run.record("state", [value.clone() for value in module.state_dict().values()])


class TwoHeads(nn.Module):
    """One body, and a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = Encoder(), nn.Linear(16, 4), Encoder(depth=2)

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        """What the task asks for."""
        return self.second(self.body(x)) if task else self.first(self.body(x))


@case(loss="mean of squares, two tasks", ranks=(2, 3))
def heads_in_turn(run: Run) -> None:
    """The second task's head is not used in the step that the plan is made for; the norm is over both heads."""
    torch.manual_seed(0)
    training = run.module(TwoHeads())
    generator = torch.Generator().manual_seed(5)
    for step in range(5):
        loss = training.model(torch.randn(8, 16, generator=generator, dtype=run.dtype), step % 2).square().mean()
        training.backward(loss)
        training.record_gradients()
        run.record("norm", run.accelerator.clip_grad_norm_(training.model.parameters(), 0.1))
        training.update(loss)
    run.record("state", [value.clone() for value in training.model.state_dict().values()])


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(16, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        hidden, _ = self.lstm(torch.tanh(self.first(x))[:, None].expand(-1, 3, -1))
        return self.last(hidden[:, -1])


@case(loss="mse")
def a_recurrent_layer(run: Run) -> None:
    """`nn.LSTM` between other layers."""
    torch.manual_seed(0)
    _fit(run, Recurrent())


class Talking(nn.Module):
    """Prints in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Encoder(depth=3), Encoder(depth=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        x = self.first(x)
        print("halfway through")
        return self.second(x)


@case(loss="mse")
def printing_in_forward(run: Run) -> None:
    """A `print` in the middle of forward."""
    torch.manual_seed(0)
    _fit(run, Talking())


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The same values."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The opposite gradient."""
        return -0.5 * gradient


class Reversed(nn.Module):
    """A custom Function between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Encoder(depth=3), Encoder(depth=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        return self.second(Reversal.apply(self.first(x)))


@case(loss="mse", ranks=(2, 3))
def custom_function_inside(run: Run) -> None:
    """A custom `autograd.Function` inside the model."""
    torch.manual_seed(0)
    _fit(run, Reversed())


@case(model="encoder", loss="mse through a Function of the script's own")
def custom_function_in_the_loss(run: Run) -> None:
    """A custom `autograd.Function` between the model and the loss."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        loss = F.mse_loss(Reversal.apply(training.model(batch["x"])), batch["target"])
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


class Transformed(nn.Module):
    """Functions under transforms: mapped over weights, and a gradient of its own for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Encoder(depth=3), Encoder(depth=3)
        self.heads = nn.Parameter(torch.randn(4, 16, 4) / 4)

    def forward(self, x: torch.Tensor, gradient: bool = False) -> torch.Tensor:
        """Hidden states."""
        x = self.first(x)
        heads = torch.vmap(lambda head, h: torch.sin(h @ head), in_dims=(0, None), out_dims=1)(self.heads, x)
        x = x + heads.flatten(1)
        if gradient:
            x = torch.vmap(torch.func.grad(lambda h: torch.sin(h).square().sum()))(x)
        return self.last(x)


@case(loss="mse", ranks=(2, 3))
def functions_under_transforms(run: Run) -> None:
    """`torch.vmap` over weights, then `torch.func.grad` for each row inside the model, with a short last batch."""
    torch.manual_seed(0)
    training = run.module(Transformed())
    for rows, gradient in ((8, False), (5, False), (8, True), (5, True)):
        x, y = torch.randn(2, rows, 16, dtype=run.dtype)
        loss = F.mse_loss(training.model(x, gradient), y)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


class Mixing(nn.Module):
    """Mixes the rows of the batch in the middle, by an operation that leaves their number as it is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = Encoder(depth=3), Encoder(depth=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        x = self.first(x)
        match self.how:
            case "roll":
                x = 0.7 * x + 0.3 * x.roll(1, 0)
            case "softmax":
                x = x * x.softmax(dim=0)
            case "similarity":
                x = (x @ x.T).softmax(-1) @ x
            case "centred":
                x = x - x.mean(0)
        return self.last(x)


@case(loss="mse")
def rows_mixed_by_roll(run: Run) -> None:
    """Rows are mixed with their neighbours inside the model, as in manifold mixup."""
    torch.manual_seed(0)
    _fit(run, Mixing("roll"))


@case(loss="mse")
def rows_mixed_by_softmax(run: Run) -> None:
    """A softmax over the batch inside the model."""
    torch.manual_seed(0)
    _fit(run, Mixing("softmax"))


@case(loss="mse")
def rows_mixed_by_similarity(run: Run) -> None:
    """Attention between the rows of the batch inside the model."""
    torch.manual_seed(0)
    _fit(run, Mixing("similarity"))


@case(loss="mse")
def rows_mixed_by_their_mean(run: Run) -> None:
    """The batch's mean is subtracted inside the model."""
    torch.manual_seed(0)
    _fit(run, Mixing("centred"))
