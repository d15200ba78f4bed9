"""What `pfeife plan` was asked for.

Models: the command's arguments, checked against each other. Ignores: whether there is such a model, machine or
schedule; those who know them say so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.sizes import parse_bytes

__all__ = ["DTYPES", "PlanRequest", "add_arguments"]

#: What can be said of the element type, and torch's name for it.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_OF_MODELS = ("machine", "batch", "dtype", "seq", "resolution", "replicas", "ranks_per_host", "overrides")


def add_arguments(parser: argparse.ArgumentParser, *, is_complete: bool = True) -> None:
    """The arguments of `pfeife plan`; unless `is_complete`, somebody fills in what is missing."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name in the zoo, timm name, transformers:NAME, "
                        "diffusers:NAME, or a config.json (file or folder)")  # fmt: skip
    parser.add_argument("--graph", metavar="FILE", help="a cost graph, .json or .json.gz, instead of a model")
    parser.add_argument("--machine", metavar="NAME", help="what to plan a model for, such as a100-40gb")
    parser.add_argument("--ranks", type=int, required=is_complete, metavar="D", help="devices in all")
    parser.add_argument("--ranks-per-host", type=int, metavar="N", help="devices of one host (8)")
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="pieces of the batch; several are tried if not given"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="rows of the whole batch")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the parameters (fp32)")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a row")
    parser.add_argument(
        "--resolution", type=int, metavar="N", help="height and width of an image, or of a latent image"
    )
    parser.add_argument("--set", dest="overrides", action="append", metavar="KEY=VALUE", help="an entry of the model's "
                        "configuration; may be repeated")  # fmt: skip
    parser.add_argument("--replicas", metavar="R", help="pipelines that share the ranks, or auto (1)")
    parser.add_argument("--memory", metavar="BYTES", help="of one device: 40GB, 38GiB")
    parser.add_argument(
        "--memory-fraction", type=float, metavar="F", help="share of it to use (all of a graph's or --memory, else 0.9)"
    )
    parser.add_argument("--schedule", default="auto", metavar="FAMILY", help="auto, or one family of orders")
    parser.add_argument("--backward", default="whole", choices=("whole", "split"), help="split: gradients of values "
                        "and of parameters may be planned apart")  # fmt: skip
    parser.add_argument("--recompute", default="none", choices=("none", "auto"), help="auto: stages may compute their "
                        "activations again")  # fmt: skip
    parser.add_argument("--effort", default="full", choices=("full", "quick"), help="quick: nothing is refined")
    parser.add_argument("--out", metavar="FILE", help="write the plan there, as JSON")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The arguments, with what they must have together."""

    model: str | None
    graph: Path | None
    machine: str | None
    num_ranks: int
    ranks_per_host: int
    num_microbatches: int | None  #: None: several are tried
    batch: int
    dtype: str
    seq: int | None
    resolution: int | None
    overrides: tuple[tuple[str, Any], ...]
    num_replicas: int | None  #: None: several are tried
    memory_bytes: int | None
    memory_fraction: float
    schedule: str
    backward: str
    recompute: str
    effort: str
    out: Path | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> PlanRequest:
        """The request that the parsed arguments make.

        Raises: PfeifeError PF138 and PF140 to PF142 for arguments that mean nothing, alone or together.
        """
        _check_together(options)
        for name in ("ranks", "ranks_per_host", "microbatches", "batch", "seq", "resolution"):
            value = vars(options)[name]
            if value is not None and value < 1:
                raise _bad(f"--{name.replace('_', '-')} {value}", "it is at least 1")
        fraction = options.memory_fraction
        if fraction is None:  # a number that somebody chose is meant as it is
            fraction = 1.0 if options.graph or options.memory else 0.9
        if not 0 < fraction <= 1:
            raise _bad(f"--memory-fraction {options.memory_fraction}", "it is above 0 and at most 1")
        replicas = _replicas(options.replicas)
        if replicas is not None and options.ranks % replicas:
            raise _bad(f"--replicas {replicas} with --ranks {options.ranks}", "replicas have equally many ranks")
        if replicas is not None and options.batch is not None and options.batch % replicas:
            raise _bad(f"--replicas {replicas} with --batch {options.batch}", "replicas have equally many rows")
        share = (options.batch or 0) // (replicas or 1)
        if options.model is not None and options.microbatches is not None and options.microbatches > share:
            raise _bad(f"--microbatches {options.microbatches} of {share} rows", "a micro-batch has at least one row")
        return cls(
            model=options.model,
            graph=Path(options.graph) if options.graph is not None else None,
            machine=options.machine,
            num_ranks=options.ranks,
            ranks_per_host=options.ranks_per_host or 8,
            num_microbatches=options.microbatches,
            batch=options.batch or 0,
            dtype=options.dtype or "fp32",
            seq=options.seq,
            resolution=options.resolution,
            overrides=tuple(_override(text) for text in options.overrides or ()),
            num_replicas=replicas,
            memory_bytes=parse_bytes(options.memory) if options.memory is not None else None,
            memory_fraction=fraction,
            schedule=options.schedule,
            backward=options.backward,
            recompute=options.recompute,
            effort=options.effort,
            out=Path(options.out) if options.out is not None else None,
        )


def _check_together(options: argparse.Namespace) -> None:
    if (options.model is None) == (options.graph is None):
        raise PfeifeError(
            id="PF140",
            what="pfeife plan takes either MODEL or --graph FILE",
            why="both were given" if options.model is not None else "neither was given",
            hints=(
                "pfeife plan vit-g14 --machine a100-40gb --ranks 8 --batch 96",
                "pfeife plan --graph costs.json.gz --ranks 8 --microbatches 16",
            ),
        )
    if options.graph is not None:
        given = [name for name in _OF_MODELS if vars(options)[name] is not None]
        if given:
            flag = "--set" if given[0] == "overrides" else f"--{given[0].replace('_', '-')}"
            raise _bad(f"{flag} with --graph", "the file says it already: its costs are those of one micro-batch")
        needed = ["microbatches"]
    else:
        needed = ["machine", "batch"]
    missing = [f"--{name}" for name in needed if vars(options)[name] is None]
    if missing:
        source = "MODEL" if options.model else "--graph"
        raise PfeifeError(id="PF140", what=f"pfeife plan {source} needs {' and '.join(missing)}")


def _replicas(text: str | None) -> int | None:
    if text is None:
        return 1
    if text.lower() == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise _bad(f"--replicas {text}", "it is a number of pipelines, or auto")
    return int(text)


def _override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise PfeifeError(
            id="PF142", what=f"--set {text} has no value", hints=("--set num_hidden_layers=4", "--set act=gelu")
        )
    try:
        return key, json.loads(value)
    except ValueError:  # a plain word needs no quotes
        return key, value


def _bad(what: str, why: str, hints: Sequence[str] = ("pfeife plan --help",)) -> PfeifeError:
    return PfeifeError(id="PF141", what=what, why=why, hints=hints)
