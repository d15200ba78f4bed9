"""Half precision: models in bfloat16, autocast, and scaled losses with overflows.

Rounding in half precision depends on how a matrix product is divided. So these cases are compared with the plain run
that accumulates over the same micro-batches, which rounds alike, and only loosely with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from fidelity_kit import Body, Run, case
from fidelity_models import Encoder
from torch import nn

_MICROBATCHES = "accumulation over the same micro-batches"
_WHOLE_BATCH = "the whole batch, up to rounding in bfloat16"


def _steps(
    run: Run,
    microbatches: int,
    *,
    model: Callable[[], nn.Module],
    context: Callable[[Run], AbstractContextManager[None]] = lambda run: nullcontext(),
) -> None:
    torch.manual_seed(0)
    training = run.module(model(), optimizer="sgd")
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        x, y = torch.randn(2, 8, 16, generator=generator).to(run.dtype)
        for rows, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            with context(run):
                loss = F.mse_loss(training.model(rows).float(), target.float())
            run.accelerator.backward(loss / microbatches)
        training.record_gradients()
        training.update()


class Mixed(nn.Module):
    """Operations that autocast lowers, and some that it keeps in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm, self.head = Encoder(depth=4), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs."""
        x = self.norm(self.encoder(x))
        scores = torch.softmax(x[:, :, None] @ x[:, None, :], -1)
        return self.head((scores @ x[:, :, None]).squeeze(-1))


def _body(microbatches: int, **options: Callable[..., object]) -> Body:
    return lambda run: _steps(run, microbatches, **options)  # type: ignore[arg-type]


@case(loss="mse", dtype=torch.bfloat16, ranks=(2, 3), reference=_body(4, model=Mixed), stated=_MICROBATCHES)
def bfloat16_model(run: Run) -> None:
    """A model in bfloat16 trains as it is."""
    _steps(run, 1, model=Mixed)


@case(
    loss="mse",
    dtype=torch.float32,
    precision="bf16",
    reference=_body(4, model=Mixed),
    stated=_MICROBATCHES,
    ranks=(2, 3),
)
def autocast_bfloat16(run: Run) -> None:
    """`Accelerator(mixed_precision="bf16")`."""
    _steps(run, 1, model=Mixed)


@case(loss="mse", dtype=torch.float32, precision="bf16", stated=_WHOLE_BATCH, tolerance=3e-2)
def autocast_bfloat16_loosely(run: Run) -> None:
    """`Accelerator(mixed_precision="bf16")` against the whole batch."""
    _steps(run, 1, model=Mixed)


@case(
    model="llama",
    loss="causal LM inside",
    dtype=torch.float32,
    precision="bf16",
    stated=_WHOLE_BATCH,
    tolerance=3e-2,
)
def autocast_bfloat16_llama(run: Run) -> None:
    """`Accelerator(mixed_precision="bf16")` on a decoder."""
    training = run.prepare("llama")
    for _ in range(2):
        training.step(training.batch())


def _by_accelerate(run: Run) -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = run.accelerator.autocast()
    return found


@case(
    loss="mse",
    dtype=torch.float32,
    precision="bf16",
    reference=_body(4, model=Mixed, context=_by_accelerate),
    stated=_MICROBATCHES,
)
def autocast_of_accelerate_around_the_call(run: Run) -> None:
    """`with accelerator.autocast():` around the call and the loss."""
    _steps(run, 1, model=Mixed, context=_by_accelerate)


def _by_torch(run: Run) -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = torch.autocast("cpu", dtype=torch.bfloat16)
    return found


@case(
    loss="mse",
    dtype=torch.float32,
    reference=_body(4, model=Mixed, context=_by_torch),
    stated=_MICROBATCHES,
)
def autocast_of_torch_around_the_call(run: Run) -> None:
    """`with torch.autocast(...)` around the call and the loss, in a script without mixed precision."""
    _steps(run, 1, model=Mixed, context=_by_torch)


class AutocastInside(nn.Module):
    """Layers in bfloat16 with layers in float32 between them, each in a region of its own or all in one."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        self.around = around
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs."""
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.around else nullcontext():
            for i, layer in enumerate(self.layers):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 3 != 1):
                    x = layer(x.float() if i % 3 == 1 else x)
                x = torch.tanh(x)
        return x.float()


def _regions() -> nn.Module:
    return AutocastInside(around=False)


def _one_region() -> nn.Module:
    return AutocastInside(around=True)


@case(loss="mse", dtype=torch.float32, ranks=(2, 3), reference=_body(4, model=_regions), stated=_MICROBATCHES)
def autocast_inside_the_model(run: Run) -> None:
    """Autocast regions, some switched off, inside forward."""
    _steps(run, 1, model=_regions)


@case(
    loss="mse",
    dtype=torch.float32,
    reference=_body(4, model=_one_region),
    stated=_MICROBATCHES,
)
def autocast_around_all_layers(run: Run) -> None:
    """One autocast region around all layers inside forward, with others nested in it."""
    _steps(run, 1, model=_one_region)


# ---------------------------------------------------------------------------------------- scaled losses


def _overflow(model: nn.Module, where: str) -> None:
    """What fp16 does now and then: an infinite gradient, in one layer only."""
    for name, parameter in model.named_parameters():
        if where in name and parameter.grad is not None:
            parameter.grad[(0,) * parameter.grad.dim()] = float("inf")


def _scaled(run: Run, *, unscale: bool, frozen: int = 0, fused: bool = False) -> None:
    torch.manual_seed(0)
    module = Encoder(depth=6)
    for layer in list(module.layers)[:frozen]:
        layer.requires_grad_(False)
    model = run.accelerator.prepare(module.to(run.dtype))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, eps=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    generator = torch.Generator().manual_seed(5)
    for step in range(8):
        x, y = torch.randn(2, 8, 16, generator=generator, dtype=run.dtype)
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if step in (1, 4, 5):
            _overflow(model, "layers.5" if step == 1 or frozen else "layers.0")
        if unscale:
            scaler.unscale_(optimizer)
            run.record("norm", torch.nn.utils.clip_grad_norm_(trainable, 0.1))
        if step not in (1, 4, 5):
            run.record_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.record("scale", [scaler.get_scale(), scaler.state_dict()["_growth_tracker"]])
        run.record("loss", loss.item())
    run.record_weights(model)


@case(loss="mse, scaled", ranks=(2, 3))
def scaler_with_overflows_on_one_stage(run: Run) -> None:
    """`GradScaler` by hand, an overflow in the first or the last layer: every rank skips the same steps."""
    _scaled(run, unscale=False)


@case(loss="mse, scaled", ranks=(2, 3))
def scaler_with_unscaling_and_clipping(run: Run) -> None:
    """`unscale_`, clipping, then the scaler's step."""
    _scaled(run, unscale=True)


@case(loss="mse, scaled", ranks=(2, 3))
def scaler_with_a_stage_without_gradients(run: Run) -> None:
    """Early stages are frozen: a rank without any gradient goes along."""
    _scaled(run, unscale=True, frozen=5)


@case(loss="mse, scaled")
def scaler_with_a_fused_optimizer(run: Run) -> None:
    """A fused optimizer, which is told of the overflow and skips by itself."""
    _scaled(run, unscale=False, fused=True)


@case(loss="mse, scaled", ranks=(3,))
def scaler_with_several_optimizers(run: Run) -> None:
    """One scaler for two models with an optimizer each, and an optimizer of a head outside."""
    torch.manual_seed(0)
    a, b = run.accelerator.prepare(Encoder(depth=4).to(run.dtype), Encoder(depth=4).to(run.dtype))
    head = nn.Linear(16, 4).to(run.dtype)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (a, b, head)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for step in range(5):
        x, y = torch.randn(2, 8, 16, dtype=run.dtype)
        first, second = F.mse_loss(head(a(x)), y[:, :4]), F.mse_loss(b(x), y)
        scaler.scale(first + second).backward()
        if step == 1:
            _overflow(a, "layers.3")
        if step == 3:
            _overflow(b, "layers.0")
        scaler.unscale_(optimizers[step % 3])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        run.record("scale", scaler.get_scale())
        run.record("loss", (first + second).item())
    run.record("head", head.weight)
    run.record_weights(a, "a")
    run.record_weights(b, "b")


def _scaled_by_accelerate(run: Run, microbatches: int) -> None:
    torch.manual_seed(0)
    accelerator = run.accelerator
    module = Mixed().to(run.dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(module, optimizer, scheduler)
    accelerator.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2).state_dict())
    generator = torch.Generator().manual_seed(5)
    for step in range(8):
        x, y = torch.randn(2, 8, 16, generator=generator)
        for rows, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            accelerator.backward(F.mse_loss(model(rows).float(), target) / microbatches)
        if step in (1, 4):
            _overflow(model, "layers.0" if step == 1 else "head")
        if step % 2:
            run.record("norm", accelerator.clip_grad_norm_(model.parameters(), 0.05).isfinite())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.record("skipped", [optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped])
        run.record("scale", accelerator.scaler.get_scale())
        run.record("rate", scheduler.get_last_lr()[0])
    run.record_weights(model)


def _scaled_reference(run: Run) -> None:
    _scaled_by_accelerate(run, 4)


@case(loss="mse, scaled", dtype=torch.float32, precision="fp16", reference=_scaled_reference, stated=_MICROBATCHES)
def scaler_of_accelerate(run: Run) -> None:
    """`mixed_precision="fp16"`: overflows on one stage, `step_was_skipped`, clipping, scale and learning rate."""
    _scaled_by_accelerate(run, 1)
