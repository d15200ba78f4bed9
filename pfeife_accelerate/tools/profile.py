"""`pfeife profile train.py`: what the script's model costs on this machine, as a table and as a file for `pfeife plan`.

`pfeife profile MODEL` does the same for a model by its name, without a script, weights, or memory for the whole model.

Models: the script itself, started as for training and ended at its first training call, so that model, batch, precision
and optimizer are the real ones; costs are those of one micro-batch.
Ignores: what the script does after that call.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.cost.hardware import device_spec, link_spec
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostGraph, Machine, read_cost_file, write_cost_file
from pfeife_accelerate.session.measuring import measured
from pfeife_accelerate.tools.launch_command import check_paths, run_script
from pfeife_accelerate.tools.models import ModelledModel, ModelOptions, resolve
from pfeife_accelerate.tools.plan_request import DTYPES
from pfeife_accelerate.tools.tables import folding_table

__all__ = ["profile", "profile_model"]

_MOST_KINDS: Final = 12
_MB: Final = 1e6


def profile(
    script: Path,
    arguments: Sequence[str],
    *,
    out: Path,
    config: Path | None = None,
    num_processes: int | None = None,
    console: Console | None = None,
) -> int:
    """Run the script until its first training call, write `out` and print what is in it; gives the exit code.

    Raises: PfeifeError PF234 for files that are not there, PF233 if the script ends without a training call.
    """
    check_paths(script, config, out, where="pfeife profile")
    with tempfile.TemporaryDirectory(prefix="pfeife-profile-") as folder:
        made = Path(folder) / out.name
        wanted = PfeifePlugin(profile_file=str(made), on_capture_failure="error")
        code = run_script(script, arguments, wanted, config, num_processes, Path(folder))
        if code != 0:
            return code
        if not made.exists():
            raise PfeifeError(
                id="PF233",
                what=f"{script} ended without a training call of a prepared model",
                where="pfeife profile",
                why="operations are measured when a model that accelerator.prepare was given is first called with "
                "gradients enabled",
                hints=("check that the script trains with these arguments", "prepare the model"),
            )
        graph, machine = read_cost_file(made)
        out.write_bytes(made.read_bytes())
    _report(console or Console(), graph, machine, out)
    return 0


def profile_model(
    name: str,
    *,
    rows: int,
    out: Path,
    dtype: str = "fp32",
    seq: int | None = None,
    resolution: int | None = None,
    seconds: float = 60.0,
    console: Console | None = None,
) -> int:
    """Measure the operations of a model on a micro-batch of `rows` for at most `seconds`, write `out`, print.

    What the seconds do not suffice for is modelled, calibrated by what was measured.

    Raises: PfeifeError PF234 if the folder of `out` is not there, and those of `resolve`.
    """
    if not out.absolute().parent.exists():
        raise PfeifeError(id="PF234", what=f"the folder {out.absolute().parent} does not exist", where="pfeife profile")
    options = ModelOptions(dtype=vars(torch)[DTYPES[dtype]], seq=seq, resolution=resolution)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec, plugin = device_spec(device), PfeifePlugin.from_environment()
    graph = ModelledModel(resolve(name, options)).cost_graph(
        rows, spec, device=device, measured=lambda ops: measured(ops, plugin, device, budget_s=seconds, spec=spec)
    )
    machine = Machine(devices=(spec,), link=link_spec("nccl" if device.type == "cuda" else "gloo"))
    write_cost_file(out, graph, machine)
    _report(console or Console(), graph, machine, out)
    return 0


def _report(console: Console, graph: CostGraph, machine: Machine, out: Path) -> None:
    console.print(_kinds(graph))
    console.print(_facts(graph, machine))
    console.print(f"written: {out}", soft_wrap=True)


@dataclass
class _Kind:
    """What the operations of one name cost together."""

    number: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    def add(self, other: _Kind) -> None:
        self.number += other.number
        self.forward_s += other.forward_s
        self.backward_s += other.backward_s
        self.saved_bytes += other.saved_bytes


def _kinds(graph: CostGraph) -> Table:
    """The kinds of operation that take longest, the others together, and all."""
    kinds: dict[str, _Kind] = {}
    for node in graph.nodes:
        one = _Kind(1, node.forward_s, node.backward_s, node.saved_bytes)
        kinds.setdefault(node.op, _Kind()).add(one)
    total, others = _Kind(), _Kind()
    for kind in kinds.values():
        total.add(kind)
    ranked = sorted(kinds.items(), key=lambda item: (-item[1].seconds, item[0]))
    table = Table(title=f"{graph.name}, one micro-batch")
    table.add_column("operation")
    for heading in ("number", "forward ms", "backward ms", "share", "kept MB"):
        table.add_column(heading, justify="right")
    for name, kind in ranked[:_MOST_KINDS]:
        _add_row(table, name, kind, total)
    for _, kind in ranked[_MOST_KINDS:]:
        others.add(kind)
    if others.number:
        _add_row(table, f"{len(ranked) - _MOST_KINDS} others", others, total)
    table.add_section()
    _add_row(table, "all", total, total)
    return table


def _add_row(table: Table, name: str, kind: _Kind, total: _Kind) -> None:
    share = kind.seconds / total.seconds if total.seconds else 0.0
    table.add_row(
        name,
        str(kind.number),
        f"{kind.forward_s * 1e3:.3f}",
        f"{kind.backward_s * 1e3:.3f}",
        f"{share:.0%}",
        f"{kind.saved_bytes / _MB:.2f}",
    )


def _facts(graph: CostGraph, machine: Machine) -> Table:
    """The device, the link, and the memory of the whole model."""
    uses = {use.owner: use for node in graph.nodes for use in node.params}.values()
    device, link = machine.device_of(0), machine.link
    table = folding_table("what", "value", title="Machine and memory")
    table.add_row("device", device.name)
    table.add_row("its memory", f"{device.memory_bytes / _MB:,.0f} MB")
    table.add_row("host time of an action", f"{device.action_s * 1e6:.0f} us")
    table.add_row("link, each way", f"{link.bytes_per_s / 1e9:.2f} GB/s after {link.latency_s * 1e6:.0f} us")
    table.add_row("parameters", f"{sum(use.num_bytes for use in uses) / _MB:,.2f} MB")
    table.add_row("with gradients and optimizer state", f"{sum(use.state_bytes for use in uses) / _MB:,.2f} MB")
    table.add_row("kept for the backward", f"{sum(node.saved_bytes for node in graph.nodes) / _MB:,.2f} MB")
    table.add_row("optimizer step", f"{sum(use.optimizer_s for use in uses) * 1e3:.3f} ms")
    return table
