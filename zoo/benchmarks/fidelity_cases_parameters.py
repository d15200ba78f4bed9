"""Parameters that are tied, frozen, unused, adapted, parametrized, or kept in containers."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from fidelity_kit import LOOPED, Run, case
from fidelity_models import Encoder
from torch import nn
from torch.nn.utils import parametrizations, parametrize


def _fit(run: Run, module: nn.Module, microbatches: int = 1) -> None:
    """Some steps of regression, every gradient recorded, and the parameters in the end."""
    training = run.module(module)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        x, y = torch.randn(2, 8, 16, generator=generator, dtype=run.dtype)
        losses = []
        for rows, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            losses.append(F.mse_loss(training.model(rows), target) / microbatches)
            run.accelerator.backward(losses[-1])
        training.record_gradients()
        training.update()
        run.record("loss", sum(loss.item() for loss in losses))
    run.record_weights(training.model)


@case(model="llama_tied", loss="causal LM inside")
def resized_embeddings(run: Run) -> None:
    """`resize_token_embeddings` before prepare, with tied embeddings."""

    def resize(model: nn.Module) -> None:
        model.resize_token_embeddings(103, mean_resizing=False)  # type: ignore[operator]

    training = run.fresh("llama_tied", change=resize)
    for _ in range(3):
        batch = training.batch()
        batch["input_ids"][:, 3] = 101
        training.step(batch)
    run.record_weights(training.model)


class Shared(nn.Module):
    """One layer used by the first, a middle and the last stage, and a weight shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        x = torch.tanh(self.first(x))
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i in (2, 5):
                x = torch.tanh(self.first(x))
        return x


@case(loss="mse", ranks=(2, 3, 4))
def shared_modules(run: Run) -> None:
    """A module called three times, on several ranks, and a weight tied between two layers."""
    torch.manual_seed(0)
    _fit(run, Shared())


@case(loss="mse", **LOOPED)
def shared_modules_looped(run: Run) -> None:
    """Tied parameters within one rank's list of stages."""
    torch.manual_seed(0)
    _fit(run, Shared())


@case(model="llama_tied", loss="causal LM inside", ranks=(3,))
def norm_counts_a_tied_parameter_once(run: Run) -> None:
    """The gradient norm over a model with tied embeddings."""
    training = run.prepare("llama_tied")
    for _ in range(2):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        run.record("norm", torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e9))
        training.update(loss)


@case(model="llama", loss="causal LM inside", ranks=(3,))
def frozen_base(run: Run) -> None:
    """All layers frozen but the embeddings' and the head's."""

    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embed" in name or "lm_head" in name)

    training = run.fresh("llama", change=freeze)
    for _ in range(3):
        training.step(training.batch())
    run.record_weights(training.model)


@case(model="encoder", loss="mse", ranks=(2, 3))
def only_the_last_layer_trains(run: Run) -> None:
    """Everything frozen but the last layer: early stages have no gradient at all."""

    def freeze(model: nn.Module) -> None:
        model.requires_grad_(False)
        model.layers[-1].requires_grad_(True)  # type: ignore[union-attr]

    training = run.fresh("encoder", change=freeze, rate=0.1)
    for _ in range(3):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        run.record("norm", run.accelerator.clip_grad_norm_(training.model.parameters(), 0.1))
        training.record_gradients()
        training.update(loss)
    run.record_weights(training.model)


class Bare(nn.Module):
    """Layers with parameters only at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A long way without parameters in the middle."""
        x = self.first(x)
        for _ in range(20):
            x = torch.tanh(x) + torch.softmax(x, -1)
        return self.last(x)


@case(loss="mse", ranks=(3, 4))
def a_stage_without_parameters(run: Run) -> None:
    """A long middle part without parameters, which is some rank's whole stage."""
    torch.manual_seed(0)
    _fit(run, Bare())


class Sometimes(nn.Module):
    """Uses one of its branches as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Encoder(depth=3), Encoder(depth=3)
        self.branches = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
        self.never = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        """Hidden states."""
        return self.head(self.branches[branch](self.stem(x)))


@case(loss="mse", ranks=(2, 3))
def parameters_unused_in_some_steps(run: Run) -> None:
    """A branch that is taken in some steps only, and a layer that is never used."""
    torch.manual_seed(0)
    training = run.module(Sometimes())
    for branch in ("a", "a", "b", "a"):
        loss = training.model(torch.randn(8, 16, dtype=run.dtype), branch).square().mean()
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(model="llama", loss="causal LM inside")
def low_rank_adapters(run: Run) -> None:
    """LoRA through peft."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    training = run.fresh("llama", change=lambda model: get_peft_model(model, config).to(run.dtype), rate=0.1)
    for _ in range(3):
        _, loss = training.forward(training.batch())
        training.backward(loss)
        training.record_gradients()
        training.update(loss)
    run.record_weights(training.model)


def _stack(change: dict[int, nn.Module] | None = None) -> nn.Sequential:
    layers = [nn.Linear(16, 16) for _ in range(6)]
    made = [(change or {}).get(i, layer) for i, layer in enumerate(layers)]
    return nn.Sequential(*(part for layer in made for part in (layer, nn.Tanh())))


@case(loss="mse")
def weight_norm_by_parametrization(run: Run) -> None:
    """`torch.nn.utils.parametrizations.weight_norm` on several layers."""
    torch.manual_seed(0)
    model = _stack()
    for i in (0, 4, 10):
        parametrizations.weight_norm(model[i])
    _fit(run, model)


@case(loss="mse")
def weight_norm_of_old(run: Run) -> None:
    """`torch.nn.utils.weight_norm`, which works by a hook before forward."""
    torch.manual_seed(0)
    model = _stack()
    for i in (0, 4, 10):
        torch.nn.utils.weight_norm(model[i])
    _fit(run, model)


@case(loss="mse")
def spectral_norm_in_eval_mode(run: Run) -> None:
    """`parametrizations.spectral_norm` whose power iteration is at rest."""
    torch.manual_seed(0)
    model = _stack()
    for i in (0, 10):
        parametrizations.spectral_norm(model[i])
    _fit(run, model.eval())


def _normalised() -> nn.Module:
    torch.manual_seed(0)
    model = _stack()
    for i in (0, 10):
        parametrizations.spectral_norm(model[i])
    return model


def _spectral_reference(run: Run) -> None:
    _fit(run, _normalised(), microbatches=4)


@case(loss="mse", reference=_spectral_reference, stated="accumulation over the same micro-batches")
def spectral_norm(run: Run) -> None:
    """`parametrizations.spectral_norm`, whose power iteration changes buffers in each forward pass."""
    _fit(run, _normalised())


class Symmetric(nn.Module):
    """A parametrization by hand."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The symmetric part."""
        return weight.triu() + weight.triu(1).T


@case(loss="mse")
def parametrized_by_hand(run: Run) -> None:
    """`parametrize.register_parametrization`, one layer's used by another stage too."""
    torch.manual_seed(0)
    model = _stack()
    for i in (2, 8):
        parametrize.register_parametrization(model[i], "weight", Symmetric())
    _fit(run, model)


class Containers(nn.Module):
    """Parameters in lists and dictionaries, a scalar one, and one without use of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(16) + 0.1 * i for i in range(4))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(16)), "b": nn.Parameter(torch.full((), 0.5))})
        self.blocks = nn.ModuleDict(OrderedDict((f"block{i}", nn.Linear(16, 16)) for i in range(4)))
        self.register_buffer("offset", torch.linspace(0, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        for scale, block in zip(self.scales, self.blocks.values(), strict=True):
            x = torch.tanh(block(x) * scale + self.shifts["a"]) * self.shifts["b"] + self.offset
        return x


@case(loss="mse", ranks=(2, 3))
def containers_of_parameters(run: Run) -> None:
    """`ParameterList`, `ParameterDict`, `ModuleDict`, a 0-dim parameter, buffers."""
    torch.manual_seed(0)
    _fit(run, Containers())


@case(loss="mse")
def frozen_in_mid_training(run: Run) -> None:
    """Layers are frozen and thawed between steps."""
    torch.manual_seed(0)
    training = run.module(_stack())
    for step in range(4):
        for i in (0, 2):
            training.model[i].requires_grad_(step != 1)
        loss = training.model(torch.randn(8, 16, dtype=run.dtype)).square().mean()
        training.backward(loss)
        training.record_gradients()
        training.update(loss)
