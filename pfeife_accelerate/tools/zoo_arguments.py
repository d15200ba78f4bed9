"""The words of `pfeife zoo`. Ignores: what they lead to (`tools/zoo.py`)."""

from __future__ import annotations

import argparse

from pfeife_accelerate.tools.plan_request import add_arguments

__all__ = ["add_zoo_arguments"]


def add_zoo_arguments(parser: argparse.ArgumentParser) -> None:
    """`list`, `show`, `plan` and `bench`."""
    commands = parser.add_subparsers(dest="zoo_command", required=True, metavar="list | show | plan | bench")
    commands.add_parser("list", help="the members: parameters, licence, whether their library is installed")
    show = commands.add_parser("show", help="all about one member, the paper's figures included")
    show.add_argument("name", metavar="NAME")
    plan = commands.add_parser("plan", help="`pfeife plan` with the member's batch, for the paper's machine")
    add_arguments(plan, is_complete=False)
    _add_bench(commands.add_parser("bench", help="train a member for some steps: one plain process against a pipeline"))


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("name", metavar="NAME")
    bench.add_argument("--ranks", type=int, default=2, metavar="N", help="processes of the pipeline (%(default)s)")
    bench.add_argument("--rows", type=int, metavar="N", help="of the whole batch (the member's)")
    bench.add_argument("--seq", type=int, metavar="N", help="tokens of a row (the member's)")
    bench.add_argument("--resolution", type=int, metavar="N", help="height and width of an image, or of a latent image")
    bench.add_argument("--microbatches", type=int, metavar="M", help="pieces of the batch (planned)")
    bench.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"), default="no", help="(%(default)s)")
    bench.add_argument("--steps", type=int, default=10, metavar="N", help="to be measured of each (%(default)s)")
    bench.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are "
                       "enough (%(default)s)")  # fmt: skip
    bench.add_argument("--threads", type=int, metavar="N", help="of each process (the cores divided by the ranks)")
