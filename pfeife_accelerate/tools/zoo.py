"""`pfeife zoo`: the members of the zoo listed, shown, planned for and measured.

Models: one command each. Ignores: how a plan is made (`tools/plan.py`) and how members train (`tools/zoo_bench.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pfeife_accelerate.tools.plan import plan
from pfeife_accelerate.tools.tables import folding_table
from pfeife_accelerate.zoo import MEMBERS, PaperFigure, PublishedSettings, ZooModel, member

__all__ = ["fill_in", "zoo"]

#: What `zoo plan` takes for what is not said: the paper's machine, or this one.
_FULL: Final = ("a100-40gb", 8)
_TINY: Final = ("cpu", 2)


def zoo(options: argparse.Namespace) -> int:
    """Do what the words ask for; gives the exit code."""
    console = Console()
    match options.zoo_command:
        case "list":
            console.print(_members())
        case "show":
            _show(console, member(options.name))
        case "plan":
            return plan(fill_in(options))
        case "bench":
            # Imported here: the other commands start nothing.
            from pfeife_accelerate.tools.zoo_bench import BenchRequest, bench

            return bench(member(options.name), BenchRequest.of(options), console)
        case _:
            raise AssertionError(options.zoo_command)
    return 0


def fill_in(options: argparse.Namespace) -> argparse.Namespace:
    """The words of `pfeife plan`, with the member's batch and the paper's machine for what was not said."""
    if options.model is None:
        return options  # which `pfeife plan` refuses
    chosen = member(options.model)
    machine, num_ranks = _TINY if chosen.is_tiny else _FULL
    defaults = {"machine": machine, "ranks": num_ranks, "batch": chosen.size.rows}
    said = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**{**vars(options), **defaults, **said})


def _members() -> Table:
    table = folding_table("name", "parameters", "library", "licence of the weights", "what it is", title="The zoo")
    table.columns[1].justify = "right"
    for model in MEMBERS.values():
        installed = model.library if model.is_installed else f"{model.library}, not installed"
        table.add_row(model.name, _millions(model.num_parameters), installed, model.licence, model.title)
    return table


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M"


def _show(console: Console, model: ZooModel) -> None:
    facts = folding_table("what", "value", title=model.name)
    size = model.size
    batch = [f"{size.rows} rows"]
    batch += [f"{size.seq} tokens"] if size.seq else []
    batch += [f"{size.resolution}x{size.resolution}"] if size.resolution else []
    for what, value in (
        ("what it is", model.title),
        ("parameters", f"{model.num_parameters:,}"),
        ("library", model.library if model.is_installed else f"{model.library}, not installed"),
        ("configuration", str(model.folder / "config.json")),
        ("weights", model.weights or "none: it is trained from random ones"),
        ("licence of the weights", model.licence),
        ("batch", ", ".join(batch)),
        ("tokenizer", _first_line(model.tokenizer)),
        ("image transform", _first_line(model.transform)),
    ):
        if value:
            facts.add_row(what, value)
    console.print(facts)
    if model.figures:
        console.print(_figures(model.figures))
    for gain in model.gains:
        console.print(Text(f"{gain.part} gains {gain.share:.0%} of the latency ({gain.place})"), soft_wrap=True)
    for settings in model.published_settings:
        console.print(Text(_published(settings)), soft_wrap=True)


def _first_line(maker: Callable[..., object] | None) -> str:
    """What its docstring says first."""
    return (maker.__doc__ or "").strip().partition("\n")[0].removesuffix(".") if maker is not None else ""


def _figures(figures: tuple[PaperFigure, ...]) -> Table:
    table = folding_table("devices", "micro-batches", "precision", "system", "items/s", "where", title="In the paper")
    for figure in figures:
        table.add_row(
            str(figure.num_devices),
            "not stated" if figure.num_microbatches is None else str(figure.num_microbatches),
            figure.precision or "not stated",
            figure.system.value,
            "out of memory" if figure.items_per_s is None else f"{figure.items_per_s:g}",
            figure.place,
        )
    return table


def _published(settings: PublishedSettings) -> str:
    said = [
        f"{settings.num_devices} devices",
        f"{settings.num_microbatches} micro-batches of {settings.rows} rows",
        f"{settings.num_layers} layers" if settings.num_layers else "",
        f"{settings.seq} tokens" if settings.seq else "",
        f"{settings.resolution} pixels" if settings.resolution else "",
        f"{settings.num_loops} loops" if settings.num_loops else "",
        settings.precision or "",
    ]
    return f"the authors' script: {', '.join(word for word in said if word)} ({settings.place})"
