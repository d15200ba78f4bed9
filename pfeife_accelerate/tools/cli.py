"""`pfeife <command>`: finds the command, leaves the work to its module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pfeife_accelerate
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.plan_request import add_arguments

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; gives the exit code."""
    parser = argparse.ArgumentParser(prog="pfeife", description="Automatic pipeline parallelism for Accelerate.")
    parser.add_argument("--version", action="version", version=f"pfeife_accelerate {pfeife_accelerate.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="show versions, patches and devices, and test two processes")
    doctor.add_argument("--no-self-test", action="store_true", help="do not start processes")
    add_arguments(commands.add_parser("plan", help="plan a model or a cost graph for a machine"))
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except PfeifeError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "doctor":
            # Imported here, for each command on its own: --help must not wait for torch.
            from pfeife_accelerate.tools.doctor import doctor

            return doctor(with_self_test=not options.no_self_test)
        case "plan":
            from pfeife_accelerate.tools.plan import plan

            return plan(options)
        case _:
            raise AssertionError(options.command)


if __name__ == "__main__":
    sys.exit(main())
