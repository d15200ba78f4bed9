"""What is trained in each row of the paper's table, and on what: stated there, published by its authors, or assumed.

Models: one setting for all figures of the same circumstances; the device's rates, of which one is fitted; how long the
authors' program needs to start an action, which is fitted too. Ignores: the figures themselves; `zoo.paper` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pfeife_accelerate.cost.catalogue import machine
from pfeife_accelerate.ir import Machine
from pfeife_accelerate.zoo import FIGURES, PaperFigure

__all__ = [
    "ENGINE_ACTION_S", "EXPLANATIONS", "FITTED", "HALF_RATE", "SETTINGS", "TF32_SHARE", "Setting", "authors_machine",
    "figures_of", "planning_machine", "simulated_machine",
]  # fmt: skip

#: What products in 16 bits reach, FLOP/s. Fitted: DeepSpeed's 124.5 items/s of ViT-g/14 on 4 devices.
HALF_RATE: Final = 74.6e12
#: What an action (a stage on one micro-batch) takes in the authors' program beyond its operations, not hidden behind
#: them, in seconds. Fitted: Pfeife's 151.4 items/s of ViT-g/14 on 4 devices.
ENGINE_ACTION_S: Final = 3.5e-3
#: What convolutions in 32 bits, which cuDNN computes in TF32 unless told otherwise, reach of TF32's 156 TFLOP/s: as
#: large a share as the catalogue gives for all products on this device. Not fitted.
TF32_SHARE: Final = 0.87
_TF32: Final = 156e12
_HALVES: Final = ("float16", "bfloat16")
#: The figures (row, system's name in `zoo.paper`) that something was fitted to; all others are predictions.
FITTED: Final = frozenset({("vit-g14-4x4", "DEEPSPEED"), ("vit-g14-4x4", "PFEIFE")})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table."""

    name: str
    model: str
    num_devices: int
    num_microbatches: int
    rows: int  #: of a micro-batch
    precision: str  #: "fp16" or "fp32"
    seq: int | None = None
    num_loops: int | None = None  #: of Pfeife's plan; None: its search chooses
    overrides: Mapping[str, Any] = field(default_factory=dict)
    stated: tuple[int | None, str | None] = (None, None)  #: micro-batches and precision, where the paper states them
    assumed: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        """Items of a step."""
        return self.rows * self.num_microbatches


_VIT: Final = Setting(
    name="",
    model="vit-g14",
    num_devices=0,
    num_microbatches=0,
    rows=24,
    precision="fp16",
    overrides={"depth": 32, "num_classes": 10},
    assumed=(
        "24 rows of a micro-batch, 224x224, 32 layers and 10 classes: the authors' script (as wide as ViT-g/14, which "
        "has 40 layers)",
        "16 bits: 8 devices without TF32 compute 156 TFLOP/s at most, 122 items/s of this model, and the paper has 297",
        "Adam",
    ),
)
_SDXL: Final = Setting(
    name="",
    model="sdxl-unet",
    num_devices=8,
    num_microbatches=8,
    rows=1,
    precision="fp16",
    num_loops=1,
    assumed=(
        "1,024x1,024 pixels (latent images of 128x128): the script's default; its launcher sets 128, at which the "
        "paper's 6 to 20 items/s would be 1 % of what the devices compute",
        "micro-batches of one row, as many as devices: the script's batch of 8 in 8 pieces on 8 devices",
        "ZeRO: the same batch, one row on each of 8 devices",
        "one loop: the authors' launcher",
        "AdamW",
    ),
)

SETTINGS: Final = (
    replace(_VIT, name="vit-g14-4x4", num_devices=4, num_microbatches=4, stated=(4, None)),
    replace(_VIT, name="vit-g14-8x16", num_devices=8, num_microbatches=16, stated=(16, None)),
    Setting(
        name="llama2-7b-8x8",
        model="llama2-7b",
        num_devices=8,
        num_microbatches=8,
        rows=1,
        precision="fp32",
        seq=256,
        num_loops=2,
        stated=(8, None),
        assumed=(
            "rows of 256 tokens, one to a micro-batch, two loops: the authors' launcher",
            "32 bits without TF32: the authors' script asks for nothing else",
            "Colossal-AI's 1F1B, its plug-in's default; its interleaved order, with two loops, is shown beside it",
            "Adam",
        ),
    ),
    replace(_SDXL, name="sdxl-unet-8-fp32", precision="fp32", stated=(None, "fp32")),
    replace(_SDXL, name="sdxl-unet-8-fp16", stated=(None, "fp16")),
    replace(_SDXL, name="sdxl-unet-2-fp16", num_devices=2, num_microbatches=2, stated=(None, "fp16")),
)

#: Why a figure is missed, by row and what is compared; shown where it is missed.
EXPLANATIONS: Final[Mapping[tuple[str, str], str]] = {}


def figures_of(setting: Setting) -> tuple[PaperFigure, ...]:
    """The paper's figures for a setting."""
    wanted = (setting.model, setting.num_devices, *setting.stated)
    return tuple(figure for figure in FIGURES if figure.circumstances == wanted)


def simulated_machine(num_devices: int, *, convolutions: bool = False) -> Machine:
    """8x A100-40GB with NVSwitch, our own runtime's time for an action; the rate of 32 bits is that of convolutions."""
    found = machine("a100-40gb", num_devices)
    device = found.device_of(0)
    rates = dict(device.flops_per_s) | dict.fromkeys(_HALVES, HALF_RATE)
    if convolutions:
        rates["float32"] = TF32_SHARE * _TF32
    return replace(found, devices=(replace(device, flops_per_s=tuple(rates.items())),))


def planning_machine(num_devices: int) -> Machine:
    """The machine as the authors' estimate sees it: actions start at once."""
    found = simulated_machine(num_devices)
    return replace(found, devices=(replace(found.device_of(0), action_s=0.0),))


def authors_machine(num_devices: int) -> Machine:
    """The machine as the authors' program uses it: each action takes `ENGINE_ACTION_S` more."""
    found = simulated_machine(num_devices)
    device = replace(found.device_of(0), action_s=ENGINE_ACTION_S, runs_ahead=False)
    return replace(found, devices=(device,))
