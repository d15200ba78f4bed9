"""Cases of what the package cannot do yet: each is listed with the reason, and runs with `--pending`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fidelity_kit import Run, case
from fidelity_models import Encoder
from torch import nn
from torch.utils.checkpoint import checkpoint

_CHECKPOINTING = "gradient checkpointing inside the model"
_BREAKS = "models that are not captured as one graph"
_ELSEWHERE = "parameters and gradients of other ranks' stages read by the script"
_INPUTS = "gradients with respect to a model's inputs"
_FUNCTION = "an `autograd.Function` of the script's own on a model's output: PF522"
_MIXED = "rows mixed inside the model by an operation that keeps their number are mixed within micro-batches only"
_AGAIN = "a second backward through a call"


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


def _fit(run: Run, module: nn.Module, steps: int = 3) -> None:
    training = run.module(module)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x, y = torch.randn(2, 8, 16, generator=generator, dtype=run.dtype)
        loss = F.mse_loss(training.model(x), y)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(loss="mse", ranks=(2, 3), pending=_CHECKPOINTING)
def checkpointed_blocks(run: Run) -> None:
    """`torch.utils.checkpoint` around the blocks of a module."""
    torch.manual_seed(0)
    _fit(run, Checkpointed())


@case(model="llama", loss="causal LM inside", ranks=(2, 3), pending=_CHECKPOINTING)
def checkpointed_llama(run: Run) -> None:
    """`gradient_checkpointing_enable()`."""
    training = run.fresh("llama", change=lambda model: model.gradient_checkpointing_enable())  # type: ignore[operator]
    for _ in range(3):
        training.step(training.batch())


@case(model="llama", loss="causal LM inside", pending=_CHECKPOINTING)
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


@case(loss="distance of two calls", pending="dropout masks drawn from the script's generator state")
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


class Breaking(nn.Module):
    """Looks at a value in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = Encoder(depth=3), Encoder(depth=3), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        x = self.first(x)
        if float(x.detach().abs().sum()) > 1e9:
            x = self.other(x)
        return self.second(x)


@case(loss="mse", pending=_BREAKS)
def control_flow_by_values(run: Run) -> None:
    """A branch on a value in the middle of forward."""
    torch.manual_seed(0)
    _fit(run, Breaking())


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(16, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        hidden, _ = self.lstm(torch.tanh(self.first(x))[:, None].expand(-1, 3, -1))
        return self.last(hidden[:, -1])


@case(loss="mse", pending=_BREAKS)
def a_recurrent_layer(run: Run) -> None:
    """`nn.LSTM` between other layers."""
    torch.manual_seed(0)
    _fit(run, Recurrent())


@case(model="encoder", loss="mse", ranks=(2, 3), pending=_ELSEWHERE)
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


@case(model="encoder", loss="mse", ranks=(2, 3), pending=_ELSEWHERE)
def norm_by_hand(run: Run) -> None:
    """A gradient norm summed over `p.grad` by the script, for its log."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        total = sum(float(p.grad.norm()) ** 2 for p in training.model.parameters() if p.grad is not None)
        run.record("norm", total**0.5)
        training.update(loss)


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


@case(model="encoder", loss="mse through a Function of the script's own", pending=_FUNCTION)
def custom_function_in_the_loss(run: Run) -> None:
    """A custom `autograd.Function` between the model and the loss."""
    training = run.prepare("encoder", rate=0.1)
    for _ in range(3):
        batch = training.batch()
        loss = F.mse_loss(Reversal.apply(training.model(batch["x"])), batch["target"])
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(model="encoder", loss="differences of neighbouring rows")
def pairs_of_rows(run: Run) -> None:
    """Rows paired by strides and by views: even with odd, chosen with rejected."""
    training = run.prepare("encoder", rate=0.1)
    for step in range(4):
        outputs = training.model(training.batch()["x"])
        if step % 2:
            first, second = outputs[::2], outputs[1::2]
        else:
            first, second = outputs.view(4, 2, 16).unbind(1)
        loss = F.softplus(-(first - second).sum(-1)).mean()
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(loss="mse", ranks=(2, 3), pending=_INPUTS)
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


@case(model="encoder", loss="mse", pending=_INPUTS)
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


@case(model="encoder", loss="two losses, a backward each", ranks=(2, 3), pending=_AGAIN)
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


@case(loss="mse", pending=_MIXED)
def rows_mixed_by_roll(run: Run) -> None:
    """Rows are mixed with their neighbours inside the model, as in manifold mixup."""
    torch.manual_seed(0)
    _fit(run, Mixing("roll"))


@case(loss="mse", pending=_MIXED)
def rows_mixed_by_softmax(run: Run) -> None:
    """A softmax over the batch inside the model."""
    torch.manual_seed(0)
    _fit(run, Mixing("softmax"))


@case(loss="mse", pending=_MIXED)
def rows_mixed_by_similarity(run: Run) -> None:
    """Attention between the rows of the batch inside the model."""
    torch.manual_seed(0)
    _fit(run, Mixing("similarity"))


@case(loss="mse")
def rows_mixed_by_their_mean(run: Run) -> None:
    """The batch's mean is subtracted inside the model."""
    torch.manual_seed(0)
    _fit(run, Mixing("centred"))
