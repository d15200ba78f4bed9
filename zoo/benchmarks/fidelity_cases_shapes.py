"""Batches of changing size and length, and arguments of all kinds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fidelity_kit import LOOPED, Run, case
from fidelity_models import Encoder
from torch import nn


@case(model="llama_tied", loss="causal LM inside", ranks=(3,))
def short_last_batch(run: Run) -> None:
    """Batches of 8, 6, 3, 2 rows and of 1 row, in 4 micro-batches."""
    training = run.prepare("llama_tied")
    for rows in (8, 6, 3, 8, 1, 2):
        training.step(training.batch(rows))


@case(model="llama", loss="causal LM inside", slow=True, **LOOPED)
def short_last_batch_looped(run: Run) -> None:
    """Short batches in the looped order."""
    training = run.prepare("llama")
    for rows in (8, 6, 3, 8, 1):
        training.step(training.batch(rows))


@case(model="llama", loss="causal LM inside", ranks=(3,))
def changing_lengths(run: Run) -> None:
    """The sequence length differs at each step."""
    training = run.prepare("llama")
    for rows, length in ((8, 12), (8, 9), (8, 17), (6, 10), (3, 23), (1, 11)):
        training.step(training.batch(rows, length))


@case(model="t5", loss="sequence to sequence inside", slow=True)
def changing_lengths_t5(run: Run) -> None:
    """Lengths of the inputs and of the labels differ at each step."""
    training = run.prepare("t5")
    for rows, length in ((8, 12), (8, 9), (6, 17)):
        training.step(training.batch(rows, length))


@case(model="llama_tied", loss="causal LM inside", ranks=(3,), slow=True, **LOOPED)
def changing_lengths_looped(run: Run) -> None:
    """The sequence length differs at each step, in the looped order."""
    training = run.prepare("llama_tied")
    for rows, length in ((8, 12), (8, 9), (8, 17), (5, 12), (8, 21)):
        training.step(training.batch(rows, length))


@case(model="llama", loss="causal LM inside", ranks=(4,), microbatches=None)
def batch_smaller_than_the_number_of_ranks(run: Run) -> None:
    """Two rows and one row on four ranks."""
    training = run.prepare("llama")
    for rows in (2, 1, 2):
        training.step(training.batch(rows))


class ManyInputs(nn.Module):
    """Takes nearly everything that a forward can take."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(depth=5)
        self.table = nn.Embedding(10, 16)

    def forward(
        self,
        x: torch.Tensor,
        *,
        scale: float,
        shift: torch.Tensor,
        weights: torch.Tensor,
        nothing: Any,
        nested: dict[str, Any],
        keep: torch.Tensor,
        ids: torch.Tensor,
        mode: str,
    ) -> dict[str, Any]:
        """Uses a scalar, a 0-dim tensor, a tensor without a batch, None, nested values, booleans, ints and a string."""
        hidden = self.encoder(x * scale + shift)
        if nothing is not None:
            hidden = hidden + nothing
        hidden = hidden * nested["gain"]["value"] + nested["parts"][0]
        hidden = torch.where(keep[:, None], hidden, -hidden) * weights
        hidden = hidden + self.table(ids) if mode == "embed" else hidden
        return {"hidden": hidden, "pair": (hidden.mean(), [hidden.sum(-1), None]), "mode": mode}


@case(loss="mse", ranks=(2, 3))
def inputs_of_all_kinds(run: Run) -> None:
    """Scalars, None, 0-dim and batch-less tensors, nested dicts, booleans and ints as arguments; nested outputs."""
    torch.manual_seed(0)
    training = run.module(ManyInputs())
    for step in range(4):
        rows = (8, 6, 8, 1)[step]
        x = torch.randn(rows, 16, dtype=run.dtype)
        outputs = training.model(
            x,
            scale=0.5 + 0.1 * (step // 2),
            shift=torch.tensor(0.1 * step, dtype=run.dtype),
            weights=torch.linspace(0.5, 1.5, 16, dtype=run.dtype),
            nothing=None,
            nested={"gain": {"value": torch.rand(rows, 16, dtype=run.dtype)}, "parts": [torch.rand(rows, 1), 3]},
            keep=torch.arange(rows) % 3 > 0,
            ids=torch.arange(rows) % 10,
            mode="embed",
        )
        loss = F.mse_loss(outputs["hidden"], x) + 0.1 * outputs["pair"][1][0].square().mean()
        training.backward(loss)
        run.record("structure", [outputs["mode"], outputs["pair"][1][1] is None, list(outputs)])
        training.update(loss)


class Crossing(nn.Module):
    """The first layer's values are read by all later ones: ints, booleans, tables, and a skip to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        hidden = first = self.embed(ids)
        mask = ids > 3
        order = ids.argsort(dim=1)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] / 10.0 ** torch.arange(16, device=ids.device)
        table = angles.to(hidden.dtype).cos()
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden * table)) * mask[..., None]
            hidden = hidden.gather(1, order[..., None].expand_as(hidden))
        return hidden + first


@case(loss="mse", ranks=(3, 4))
def values_that_cross_stages(run: Run) -> None:
    """Ints, booleans, tables and a skip made by the first stage and read by all others."""
    torch.manual_seed(0)
    training = run.module(Crossing())
    for length in (6, 6, 9, 5):
        ids = torch.randint(0, 20, (8, length))
        loss = training.model(ids).square().mean()
        training.backward(loss)
        training.record_gradients()
        training.update(loss)


@case(model="unet", loss="mse to noise drawn by the script")
def noise_drawn_by_the_script(run: Run) -> None:
    """`torch.randn_like(latents)` and random timesteps; the generator's state is recorded."""
    training = run.prepare("unet")
    for _ in range(2):
        batch = training.batch()
        batch.pop("target")
        latents = batch["sample"]
        noise = torch.randn_like(latents)
        batch["timestep"] = torch.randint(0, 1000, (latents.shape[0],))
        batch["sample"] = latents + noise * 0.1
        loss = F.mse_loss(training.model(**batch).sample, noise)
        training.backward(loss)
        training.update(loss)
        run.record("state", torch.get_rng_state())
    run.record("drawn", torch.rand(3))


@case(model="unet", loss="mse to the noise", ranks=(2, 3))
def rows_of_conditions_compared(run: Run) -> None:
    """SDXL's conditions, one reshaped by the rows of another: steps, a short last batch, an evaluation."""
    training = run.fresh("unet")
    for rows in (8, 8, 5):
        batch = training.batch(rows)
        noise = batch.pop("target")
        loss = F.mse_loss(training.model(**batch, return_dict=False)[0], noise)
        training.backward(loss)
        training.record_gradients()
        training.update(loss)
    training.model.eval()
    with torch.no_grad():
        run.record("evaluated", training.model(**batch).sample)
