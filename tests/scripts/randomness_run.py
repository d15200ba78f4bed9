"""Scenarios about random numbers and gradient checkpointing, one after the other: `randomness_run.py FOLDER NAME...`.

A plain Accelerate script. Every scenario prints what it found on the main process, as `name: json`.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 8


class Block(nn.Module):
    """Dropout of every kind that models use: of activations, of attention weights, of whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(x.shape[0], 2, 2, 2)
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if self.training else 0.0)
        y = torch.tanh(self.linear(x))
        if self.training:
            y = y * x.new_empty(x.shape[0], 1).bernoulli_(0.8)
        return torch.tanh(x + self.dropout(y) + attended.reshape(x.shape))


class Net(nn.Module):
    """Blocks, computed again in the backward pass if `again`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def _made() -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = Net().double()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _batches(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(BATCH, 8, generator=generator, dtype=torch.float64) for _ in range(number)]


def _script_draws() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


def _seed_all() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def losses(folder: str) -> Any:
    """Three steps, an evaluation with dropout, and what the script drew meanwhile."""
    accelerator, model, optimizer = _made()
    _seed_all()
    found, drawn = [], []
    for x in _batches(3):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        drawn += _script_draws()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    with torch.no_grad():
        found += [model(_batches(1)[0]).sum().item() for _ in range(2)]
    model.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        found.append(model(_batches(1)[0]).sum().item())
    assert torch.equal(torch.get_rng_state(), state), "without dropout nothing is drawn"
    return {"losses": found, "drawn": drawn}


def unequal(folder: str) -> Any:
    """On two ranks or more, numbers that the main process alone draws change no mask: the last rank decides."""
    runs = []
    for extra in (0, 7):
        accelerator, model, _ = _made()
        torch.manual_seed(3)
        runs.append([])
        for x in _batches(3):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            if accelerator.is_main_process:
                torch.rand(extra)
            runs[-1].append(loss.item())
    assert runs[0] == runs[1], runs
    assert len(set(runs[0])) == 3
    return "equal"


def repeats(folder: str) -> Any:
    """Equal masks after `manual_seed`, and for a teacher after `set_rng_state`; others in further calls."""
    accelerator, student, _ = _made()
    teacher = Net().double()
    teacher.load_state_dict(accelerator.get_state_dict(student))
    teacher = accelerator.prepare(teacher)
    (x,) = _batches(1)
    state = torch.get_rng_state()
    first, second = student(x), student(x)
    torch.set_rng_state(state)
    with torch.no_grad():
        third, fourth, fifth = teacher(x), teacher(x), student(x)
    torch.testing.assert_close(first.detach(), third, rtol=1e-12, atol=0)
    torch.testing.assert_close(second.detach(), fourth, rtol=1e-12, atol=0)
    assert not any(torch.allclose(third, other) for other in (fourth, fifth))
    torch.manual_seed(9)
    with torch.no_grad():
        once = teacher(x)
        torch.manual_seed(9)
        torch.testing.assert_close(student(x), once, rtol=1e-12, atol=0)
        assert not torch.allclose(student(x), once)
    return once.sum().item()


def save(folder: str) -> Any:
    """Two steps and a third call whose masks go into the count, a checkpoint, and the losses after it."""
    return _resumable(folder, load=False)


def load(folder: str) -> Any:
    """The losses after the checkpoint in another run."""
    return _resumable(folder, load=True)


def _resumable(folder: str, *, load: bool) -> list[float]:
    accelerator, model, optimizer = _made()
    batches = _batches(5)
    torch.manual_seed(1 if load else 2)
    found = []
    if load:
        accelerator.load_state(folder)
    for step in range(2 if load else 0, 5):
        loss = model(batches[step]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            found.append(loss.item())
        if step == 1:
            accelerator.save_state(folder)
    return found


def alone(folder: str) -> Any:
    """An evaluation with dropout on the main process alone disturbs neither its generator nor the next step."""
    found = []
    for asks in (False, True):
        accelerator, model, _ = _made()
        torch.manual_seed(4)
        (x,) = _batches(1)
        model(x).square().mean().backward()
        if asks and accelerator.is_main_process:
            with torch.no_grad():
                model(x)
        accelerator.wait_for_everyone()
        with torch.no_grad():
            found.append([model(x).sum().item(), torch.rand(1).item()])
    assert found[0] == found[1], found
    return found[0]


def again(folder: str) -> Any:
    """With dropout, the gradient with checkpointing is that without, to the last bit."""
    accelerator, model, _ = _made()
    (x,) = _batches(1)
    gradients = []
    for model.again in (False, True, False):
        model.zero_grad()
        torch.manual_seed(8)
        accelerator.backward(model(x).square().mean())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    values = []
    for model.again in (False, True):
        torch.manual_seed(8)
        with torch.no_grad():
            values.append(model(x))
    assert torch.equal(*values)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
        assert torch.equal(gradient, gradients[2][name]), name
    return "equal"


# ----------------------------------------------------------------------------------------------------------------------
# Gradient checkpointing of libraries, against the same model in one process
# ----------------------------------------------------------------------------------------------------------------------


def llama(folder: str) -> Any:
    """A causal language model with the loss inside."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.gradient_checkpointing_enable()
    tokens = torch.arange(BATCH * 9).reshape(BATCH, 9) % 48
    labels = torch.where(tokens % 5 == 0, -100, tokens)
    loss = lambda model: model(input_ids=tokens, labels=labels).loss  # noqa: E731
    return [_as_plain(model.train(), loss, torch.float32, 1e-5), _as_plain(model, loss, torch.float64, 1e-10)]


def unet(folder: str) -> Any:
    """A diffusion model: skips across regions."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    model.enable_gradient_checkpointing()
    x, noise = torch.randn(2, BATCH, 4, 8, 8, dtype=torch.float64)
    text, times = torch.randn(BATCH, 5, 16, dtype=torch.float64), torch.arange(BATCH) * 100

    def loss(model: Any) -> torch.Tensor:
        dtype = model.dtype
        return F.mse_loss(model(x.to(dtype), times, text.to(dtype)).sample, noise.to(dtype))

    return _as_plain(model.train(), loss, torch.float64, 1e-10)


def vit(folder: str) -> Any:
    """A vision transformer."""
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 3, "embed_dim": 32, "num_heads": 4, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    model.set_grad_checkpointing()
    x, labels = torch.randn(BATCH, 3, 32, 32, dtype=torch.float64), torch.arange(BATCH) % 5

    def loss(model: Any) -> torch.Tensor:
        dtype = next(p.dtype for p in model.parameters())
        return F.cross_entropy(model(x.to(dtype)), labels)

    return _as_plain(model.train(), loss, torch.float64, 1e-10)


def _as_plain(model: Any, loss_of: Callable[[Any], torch.Tensor], dtype: torch.dtype, tolerance: float) -> str:
    accelerator = Accelerator()
    plain, ours = copy.deepcopy(model).to(dtype), copy.deepcopy(model).to(dtype)
    loss_of(plain).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    ours = accelerator.prepare(ours)
    accelerator.backward(loss_of(ours))
    for name, parameter in ours.named_parameters():
        if parameter.device.type != "meta":
            error, scale = (parameter.grad - wanted[name]).norm(), wanted[name].norm()
            # what is zero but for rounding, such as the gradient of a key's bias, has no relative error
            assert error <= tolerance * max(scale, 1e-2), (dtype, name, float(error), float(scale))
    return "equal"


def main() -> None:
    """Run the scenarios that the command line names."""
    folder, *names = sys.argv[1:]
    for name in names:
        found = globals()[name](folder)
        if Accelerator().is_main_process:
            print(f"{name}: {json.dumps(found)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
