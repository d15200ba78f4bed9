"""What the paper reports of the zoo's models, as data.

*Pfeife: Automatic Pipeline Parallelism for PyTorch* (Jhoo, Hur, Lopes; ICML 2025), its end-to-end experiments on
8x A100-40GB with NVSwitch. Models: each figure with the circumstances that are stated. Ignores: what is not stated
there; `PUBLISHED_SETTINGS` says what the authors' published scripts set, which need not be what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = [
    "FIGURES",
    "GAINS",
    "PUBLISHED_SETTINGS",
    "PaperFigure",
    "PaperGain",
    "PublishedSettings",
    "System",
]

_PIPELINES: Final = "Table 1, throughput comparison of pipeline parallelism"
_ZERO: Final = "end-to-end performance, SDXL against DeepSpeed ZeRO"
_PARTS: Final = "end-to-end performance, what prefetch and looping contribute"
_SCRIPTS: Final = "github.com/MerHS/pfeife, a5a85ca, bench_models"


class System(Enum):
    """Who trained."""

    PFEIFE = "Pfeife"
    DEEPSPEED = "DeepSpeed pipeline"
    COLOSSAL_AI = "Colossal-AI pipeline"
    ZERO2 = "DeepSpeed ZeRO2"
    ZERO3 = "DeepSpeed ZeRO3"


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One measured throughput; None for what is not stated."""

    model: str  #: the name of the zoo's member
    system: System
    num_devices: int
    items_per_s: float | None  #: None: it ran out of memory
    place: str  #: in the paper
    num_microbatches: int | None = None
    precision: str | None = None  #: "fp32" or "fp16"

    @property
    def circumstances(self) -> tuple[str, int, int | None, str | None]:
        """What figures that can be compared have in common."""
        return self.model, self.num_devices, self.num_microbatches, self.precision


@dataclass(frozen=True, kw_only=True)
class PaperGain:
    """How much of the latency of a step one part of the method saves."""

    model: str
    part: str  #: "prefetch" or "looping"
    share: float
    place: str


@dataclass(frozen=True, kw_only=True)
class PublishedSettings:
    """What a script published by the authors trains; None for what it leaves open or has not."""

    model: str
    num_devices: int
    rows: int  #: of a micro-batch
    num_microbatches: int
    place: str
    num_layers: int | None = None
    num_classes: int | None = None
    seq: int | None = None  #: tokens of a row
    resolution: int | None = None  #: pixels of an image's side
    num_loops: int | None = None
    precision: str | None = None


def _vit(system: System, devices: int, microbatches: int, items_per_s: float) -> PaperFigure:
    return PaperFigure(
        model="vit-g14",
        system=system,
        num_devices=devices,
        num_microbatches=microbatches,
        items_per_s=items_per_s,
        place=_PIPELINES,
    )


def _llama(system: System, items_per_s: float) -> PaperFigure:
    return PaperFigure(
        model="llama2-7b",
        system=system,
        num_devices=8,
        num_microbatches=8,
        items_per_s=items_per_s,
        place=_PIPELINES,
    )


def _sdxl(system: System, devices: int, precision: str, items_per_s: float | None) -> PaperFigure:
    return PaperFigure(
        model="sdxl-unet",
        system=system,
        num_devices=devices,
        precision=precision,
        items_per_s=items_per_s,
        place=_ZERO,
    )


FIGURES: Final = (
    _vit(System.DEEPSPEED, 4, 4, 124.5),
    _vit(System.PFEIFE, 4, 4, 151.4),
    _vit(System.DEEPSPEED, 8, 16, 297.7),
    _vit(System.PFEIFE, 8, 16, 282.2),
    _llama(System.COLOSSAL_AI, 6.80),
    _llama(System.PFEIFE, 7.46),
    _sdxl(System.ZERO2, 8, "fp32", None),
    _sdxl(System.ZERO3, 8, "fp32", 3.22),
    _sdxl(System.PFEIFE, 8, "fp32", 6.09),
    _sdxl(System.ZERO2, 8, "fp16", 19.8),
    _sdxl(System.PFEIFE, 8, "fp16", 12.1),
    _sdxl(System.ZERO2, 2, "fp16", 3.78),
    _sdxl(System.PFEIFE, 2, "fp16", 3.72),
)

GAINS: Final = (
    PaperGain(model="vit-g14", part="prefetch", share=0.08, place=_PARTS),
    PaperGain(model="vit-g14", part="looping", share=0.09, place=_PARTS),
)

PUBLISHED_SETTINGS: Final = (
    # transformers' ViTForImageClassification, as wide as ViT-g/14 but with 32 layers instead of 40, on CIFAR-10.
    PublishedSettings(
        model="vit-g14",
        num_devices=2,
        rows=24,
        num_microbatches=2,
        num_layers=32,
        num_classes=10,
        resolution=224,
        place=f"{_SCRIPTS}/train_vit.sh and models/train_vit.py",
    ),
    PublishedSettings(
        model="llama2-7b",
        num_devices=8,
        rows=1,
        num_microbatches=8,
        seq=256,
        num_loops=2,
        place=f"{_SCRIPTS}/train_llama.sh",
    ),
    PublishedSettings(
        model="sdxl-unet",
        num_devices=8,
        rows=8,
        num_microbatches=8,
        resolution=128,
        num_loops=1,
        precision="fp32",
        place=f"{_SCRIPTS}/train_sdxl.sh",
    ),
)
