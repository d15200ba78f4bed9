"""A thousand steps: whether memory, threads or file descriptors grow, and whether the last steps are as fast.

    python zoo/benchmarks/endurance.py [--steps 1000] [--model tiny] [--microbatches 4] [--out FILE.md]

Two ranks with one thread each train a model in which a step costs next to nothing, so that what the package itself
leaves behind at each step shows. Models: the holdings of each rank after the first and after the last hundred steps
(the very first ten aside), with garbage collected; where something else uses the machine, processor time tells more.
Ignores: leaks of less than a page a hundred steps. Fails (exit status 1) on growth.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from peers_entries import ours
from peers_rank import Holdings
from peers_turns import one_thread_each, started

__all__ = ["MEMORY_GROWTH_MB", "SLOWER", "Endured", "markdown"]

FIRST, WINDOW = 10, 100  # the first steps plan, and fill caches
#: What the allocator and the interpreter's own caches may still take after the first hundred steps.
MEMORY_GROWTH_MB = 2.0
SLOWER = 1.05
LIMIT_S = 3600


@dataclass(frozen=True, kw_only=True)
class Endured:
    """A run of many steps."""

    steps: int
    early: tuple[Holdings, ...]  #: of each rank, after the first window
    late: tuple[Holdings, ...]  #: at the end
    early_s: float  #: median step of the first window
    late_s: float  #: of the last one
    early_cpu_s: tuple[float, ...]  #: processor time of each rank for a step of the first window
    late_cpu_s: tuple[float, ...]  #: of the last one

    def problems(self) -> Iterator[str]:
        """What has grown."""
        for rank, (early, late) in enumerate(zip(self.early, self.late, strict=True)):
            if late.memory_mb > early.memory_mb + MEMORY_GROWTH_MB:
                yield f"rank {rank}: {late.memory_mb - early.memory_mb:.1f} MB more"
            if late.threads > early.threads:
                yield f"rank {rank}: {late.threads - early.threads} threads more"
            if late.descriptors > early.descriptors:
                yield f"rank {rank}: {late.descriptors - early.descriptors} file descriptors more"
        if self.late_s > SLOWER * self.early_s:
            yield f"the last {WINDOW} steps take {self.late_s / self.early_s:.2f} times as long as the first {WINDOW}"


def endure(options: argparse.Namespace, folder: Path) -> Endured:
    """Train."""
    entry = ours("pfeife_accelerate", options.microbatches, folder / "cache")
    rows = max(8, options.microbatches)
    with started([entry], (options.model, rows), folder, limit_s=LIMIT_S, warm_up=lambda _: None) as (
        playing,
        failures,
    ):
        if failures:
            raise SystemExit("; ".join(failures.values()))
        (contestant,) = playing.values()
        contestant.steps(FIRST)
        held, seconds = [contestant.ask("holdings")], []
        for number in (WINDOW, options.steps - FIRST - 2 * WINDOW, WINDOW):
            seconds.append([record.seconds for record in contestant.steps(number)])
            held.append(contestant.ask("holdings"))
        start, early, before, late = held
        return Endured(
            steps=options.steps,
            early=tuple(early),
            late=tuple(late),
            early_s=statistics.median(seconds[0]),
            late_s=statistics.median(seconds[-1]),
            early_cpu_s=_cpu_s(start, early),
            late_cpu_s=_cpu_s(before, late),
        )


def _cpu_s(before: Sequence[Holdings], after: Sequence[Holdings]) -> tuple[float, ...]:
    return tuple((end.cpu_s - start.cpu_s) / WINDOW for start, end in zip(before, after, strict=True))


def markdown(found: Endured, model: str, command: str) -> str:
    """The document."""
    lines = [
        "# Endurance",
        "",
        f"{found.steps} steps of the model `{model}` on two ranks, one thread each.",
        "",
        "| | | MB | threads | file descriptors | median ms of a step | processor ms of a step |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for when, holdings, step_ms, cpu_s in (
        (f"first {WINDOW} steps", found.early, 1e3 * found.early_s, found.early_cpu_s),
        (f"last {WINDOW} steps", found.late, 1e3 * found.late_s, found.late_cpu_s),
    ):
        lines += [
            f"| {when} | rank {rank} | {held.memory_mb:.1f} | {held.threads} | {held.descriptors} | {step_ms:.2f} "
            f"| {1e3 * cpu_s[rank]:.2f} |"
            for rank, held in enumerate(holdings)
        ]
    problems = list(found.problems())
    lines += ["", *(f"- {problem}" for problem in problems)] if problems else ["", "Nothing has grown."]
    versions = f"Python {platform.python_version()}, torch {version('torch')}, {platform.machine()}."
    return "\n".join([*lines, "", f"{versions} Generated by:", "", f"    {command}", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 1 where anything has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.steps <= FIRST + 2 * WINDOW:
        parser.error(f"more than {FIRST + 2 * WINDOW} steps: the first and the last {WINDOW} are compared")
    one_thread_each()
    with tempfile.TemporaryDirectory() as folder:
        found = endure(options, Path(folder))
    text = markdown(found, options.model, " ".join(["python zoo/benchmarks/endurance.py", *sys.argv[1:]]))
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return int(any(True for _ in found.problems()))


if __name__ == "__main__":
    raise SystemExit(main())
