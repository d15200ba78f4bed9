"""`pfeife reproduce`: the paper's table by simulation, printed and written as Markdown.

Models: rows by name, one after the other, with the models captured on the way. Ignores: measuring anything.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Final

from rich.console import Console
from rich.text import Text

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.tools.plan_file import check_folder
from pfeife_accelerate.tools.reproduce_costs import Graphs
from pfeife_accelerate.tools.reproduce_report import markdown, parts, print_parts
from pfeife_accelerate.tools.reproduce_rows import Gain, gains, row
from pfeife_accelerate.tools.reproduce_settings import SETTINGS, Setting
from pfeife_accelerate.zoo import GAINS

__all__ = ["reproduce"]

_WIDTH: Final = 200  # where nobody reads along


def reproduce(options: argparse.Namespace) -> int:
    """Simulate, print, write; gives the exit code.

    Raises: PfeifeError PF160 for a row that there is not.
    """
    chosen = _chosen(options.rows)
    if options.out is not None:
        check_folder(options.out)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    found_gains: tuple[Gain, ...] = ()
    with console.status("reading the models") as status:
        graphs = Graphs(options.graphs, tell=status.update)
        rows = []
        for setting in chosen:
            rows.append(row(setting, graphs.graph, tell=status.update))
            if not found_gains and any(gain.model == setting.model for gain in GAINS):
                status.update(f"{setting.name}: what prefetch and looping save")
                found_gains = gains(setting, graphs.graph)
    shown = parts(rows, found_gains)
    print_parts(console, shown)
    if options.out is not None:
        options.out.write_text(markdown(shown, _command(options)), encoding="utf-8")
        console.print(Text(f"written to {options.out}"), soft_wrap=True)
    return 0


def _chosen(names: list[str] | None) -> tuple[Setting, ...]:
    known = {setting.name: setting for setting in SETTINGS}
    for name in names or ():
        if name not in known:
            near = did_you_mean(name, known)
            raise PfeifeError(
                id="PF160",
                what=f"the paper's table has no row {name!r}",
                hints=(*((f"did you mean {near!r}?",) if near else ()), f"its rows: {', '.join(known)}"),
            )
    return tuple(setting for setting in SETTINGS if names is None or setting.name in names)


def _command(options: argparse.Namespace) -> str:
    words = ["pfeife", "reproduce"]
    if options.rows:
        words += ["--rows", *options.rows]
    return shlex.join([*words, "--out", str(options.out)])
