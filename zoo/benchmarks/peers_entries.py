"""Who takes part, by name: each contestant's entry, made without loading torch.

Models: the tools as data, so that the referee stays small and a fresh process finds its environment before torch does.
Ignores: their trainers, which each process loads for itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers_rank import Entry

__all__ = [
    "LARGE_PAGES",
    "LARGE_PAGES_NAME",
    "LIBRARIES",
    "ORDERS",
    "Order",
    "deepspeed",
    "ours",
    "pipelining",
    "plain",
    "profile",
    "replicated",
    "with_large_pages",
]

#: As `accelerate launch` starts this package's processes on CPU.
LARGE_PAGES: Mapping[str, str] = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
LARGE_PAGES_NAME = ", large pages"

#: What a model is built with: loaded before its memory is counted.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "vit": ("timm",),
    "resnet": ("timm",),
    "llama": ("transformers.models.llama.modeling_llama",),
    "unet": ("diffusers.models.unets.unet_2d_condition",),
    "tiny": (),
}


@dataclass(frozen=True, kw_only=True)
class Order:
    """A schedule: its class, its stages a rank, and whether the ranks turn round (a V) instead of starting again."""

    schedule: str
    per_rank: int
    turns_round: bool = False

    def ranks(self, num_ranks: int) -> list[int]:
        """The rank of each stage."""
        loop = list(range(num_ranks))
        loops = [loop[::-1] if self.turns_round and number % 2 else loop for number in range(self.per_rank)]
        return [rank for ranks in loops for rank in ranks]


ORDERS: Mapping[str, Order] = {
    "GPipe": Order(schedule="ScheduleGPipe", per_rank=1),
    "1F1B": Order(schedule="Schedule1F1B", per_rank=1),
    "Interleaved1F1B": Order(schedule="ScheduleInterleaved1F1B", per_rank=2),
    "InterleavedZeroBubble": Order(schedule="ScheduleInterleavedZeroBubble", per_rank=2),
    "ZBV": Order(schedule="ScheduleZBVZeroBubble", per_rank=2, turns_round=True),
}


def pipelining(order: str, num_microbatches: int, bounds: Sequence[int], name: str = "") -> Entry:
    """`torch.distributed.pipelining` with one of its schedules; stages are the units between two bounds."""
    return Entry(
        name=name or order,
        maker="peers_pipelining:Pipelining",
        num_microbatches=num_microbatches,
        imports=("torch.distributed.pipelining",),
        options={"order": order, "bounds": tuple(bounds)},
    )


def deepspeed(num_microbatches: int, bounds: Sequence[int], folder: Path | None) -> Entry:
    """DeepSpeed's pipeline, installed in a folder of its own or with everything else."""
    return Entry(
        name="DeepSpeed",
        maker="peers_deepspeed:DeepSpeed",
        num_microbatches=num_microbatches,
        imports=("deepspeed", "deepspeed.pipe"),
        environment={"DS_ACCELERATOR": "cpu"},
        path=() if folder is None else (str(folder),),
        options={"bounds": tuple(bounds)},
    )


def plain(num_microbatches: int | None) -> Entry:
    """One process: the whole batch, or accumulation over micro-batches."""
    return Entry(
        name="plain" if num_microbatches is None else "plain accumulation",
        maker="peers_plain:Plain",
        num_ranks=1,
        num_microbatches=num_microbatches,
    )


def profile(num_microbatches: int) -> Entry:
    """One process that times the units of a model for one micro-batch."""
    return Entry(name="profile", maker="peers_plain:Profile", num_ranks=1, num_microbatches=num_microbatches)


def replicated(name: str) -> Entry:
    """DDP or FSDP2: two ranks with half the batch each."""
    return Entry(name=name, maker=f"peers_replicated:{name}", imports=("torch.distributed.fsdp",))


def ours(name: str, num_microbatches: int | None, cache: Path, **options: str) -> Entry:
    """This package, told by its environment variables; what is not given is on auto."""
    number = {} if num_microbatches is None else {"PFEIFE_NUM_MICROBATCHES": str(num_microbatches)}
    foreign = {variable: None for variable in os.environ if variable.startswith(("PFEIFE_", "ACCELERATE_"))}
    return Entry(
        name=name,
        maker="peers_ours:Ours",
        num_microbatches=num_microbatches,
        imports=("accelerate", "torch.compiler", "torch._functorch.partitioners", "pfeife_accelerate.session"),
        environment={
            **foreign,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": None,
            "ACCELERATE_USE_CPU": "true",
            "PFEIFE_ENABLED": "true",
            "PFEIFE_CACHE_DIR": str(cache),
            **number,
            **options,
        },
        connects_itself=True,
        at_start=LARGE_PAGES,
    )


def with_large_pages(entry: Entry) -> Entry:
    """The same contestant with what `accelerate launch` sets for ours."""
    return replace(entry, name=entry.name + LARGE_PAGES_NAME, at_start=LARGE_PAGES)
