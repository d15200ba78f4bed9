"""`pfeife <command>`: finds the command, leaves the work to its module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pfeife_accelerate
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.plan_request import DTYPES, add_arguments
from pfeife_accelerate.tools.zoo_arguments import add_zoo_arguments

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; gives the exit code."""
    parser = argparse.ArgumentParser(prog="pfeife", description="Automatic pipeline parallelism for Accelerate.")
    parser.add_argument("--version", action="version", version=f"pfeife_accelerate {pfeife_accelerate.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="show versions, patches and devices, and test two processes")
    doctor.add_argument("--no-self-test", action="store_true", help="do not start processes")
    add_arguments(commands.add_parser("plan", help="plan a model or a cost graph for a machine"))
    _add_profile(commands)
    _add_trace(commands)
    add_zoo_arguments(commands.add_parser("zoo", help="models to try: list, show, plan and measure them"))
    _add_reproduce(commands)
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except PfeifeError as error:
        print(error, file=sys.stderr)
        return 2


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser("profile", help="measure a script's operations and the links, and write a cost file")
    profile.add_argument("--out", type=Path, default=Path("cost.json.gz"), help="the cost file (default: %(default)s)")
    profile.add_argument("--processes", type=int, help="processes to start (default: the configuration's, or 2)")
    profile.add_argument("--config", type=Path, help="yaml of accelerate launch")
    profile.add_argument("--rows", type=int, default=1, help="of a model by name: rows of a micro-batch (%(default)s)")
    profile.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="of a model by name (%(default)s)")
    profile.add_argument("--seq", type=int, metavar="N", help="of a model by name: tokens of a row")
    profile.add_argument("--resolution", type=int, metavar="N", help="of a model by name: height and width")
    profile.add_argument("--seconds", type=float, default=60.0, help="of a model by name: to measure (%(default)s)")
    profile.add_argument("script", help="the training script, stopped at its first training call; or a model's name")
    profile.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser("trace", help="show recorded training steps beside their plan")
    trace.add_argument("--perfetto", type=Path, metavar="FILE", help="also write a file for ui.perfetto.dev")
    trace.add_argument("--out", type=Path, default=Path("trace.json"), help="of a script: the trace (%(default)s)")
    trace.add_argument("--processes", type=int, help="of a script: processes (default: the configuration's, or 2)")
    trace.add_argument("--config", type=Path, help="of a script: yaml of accelerate launch")
    trace.add_argument("file", type=Path, help="what the option `trace` has written; or a training script to be run")
    trace.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def _add_reproduce(commands: Any) -> None:
    reproduce = commands.add_parser("reproduce", help="the paper's table, by simulation")
    reproduce.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows (default: all)")
    reproduce.add_argument("--out", type=Path, metavar="FILE", help="also write the tables as Markdown")
    reproduce.add_argument("--graphs", type=Path, metavar="FOLDER", help="read cost files from here, and keep new ones")


def _behind_the_file(options: argparse.Namespace) -> Path | None:
    """`--perfetto` in front of the file or behind it, where a script's own arguments would be."""
    behind = argparse.ArgumentParser(prog=f"pfeife trace {options.file}")
    behind.add_argument("--perfetto", type=Path, metavar="FILE", default=options.perfetto)
    found: Path | None = behind.parse_args(options.arguments).perfetto
    return found


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "doctor":
            # Imported here, for each command on its own: --help must not wait for torch.
            from pfeife_accelerate.tools.doctor import doctor

            return doctor(with_self_test=not options.no_self_test)
        case "plan":
            from pfeife_accelerate.tools.plan import plan

            return plan(options)
        case "profile":
            from pfeife_accelerate.tools.profile import profile, profile_model

            if not options.script.endswith(".py") and not Path(options.script).is_file():
                return profile_model(
                    options.script,
                    rows=options.rows,
                    dtype=options.dtype,
                    seq=options.seq,
                    resolution=options.resolution,
                    seconds=options.seconds,
                    out=options.out,
                )
            return profile(
                Path(options.script),
                options.arguments,
                out=options.out,
                config=options.config,
                num_processes=options.processes,
            )
        case "trace":
            from pfeife_accelerate.tools.trace import show, trace_script

            if options.file.suffix != ".py":
                return show(options.file, perfetto=_behind_the_file(options))
            return trace_script(
                options.file,
                options.arguments,
                out=options.out,
                config=options.config,
                num_processes=options.processes,
                perfetto=options.perfetto,
            )
        case "zoo":
            from pfeife_accelerate.tools.zoo import zoo

            return zoo(options)
        case "reproduce":
            from pfeife_accelerate.tools.reproduce import reproduce

            return reproduce(options)
        case _:
            raise AssertionError(options.command)


if __name__ == "__main__":
    sys.exit(main())
