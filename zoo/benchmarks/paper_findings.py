"""The findings of the Pfeife paper on ViT-g/14, by simulation: what uneven slicing, prefetch and looping are worth.

    python zoo/benchmarks/paper_findings.py [--ranks 2 4] [--microbatches 4 8 16] [--out FILE]

Models: equal-time cuts ("even") and cuts that a descent found for the very order they are run with ("uneven"); 1F1B
without prefetch and with all of it; the looped order with 2 and 3 loops. Only what fits into memory counts.
Ignores: everything that `event_simulator` ignores; placements other than round robin.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baselines import equal_time_cuts
from event_simulator import simulate
from local_search import descend
from pipeline_orders import Parameters, looped, round_robin

from pfeife_accelerate.ir import CostGraph, Machine, read_cost_file

__all__ = ["Looping", "Setting", "Slicing", "looping", "setting", "slicing"]

GRAPH = Path(__file__).parent / "graphs" / "vit_g14_mb24.json.gz"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A graph, and how many ranks and micro-batches run it."""

    graph: CostGraph
    machine: Machine
    ranks: int
    microbatches: int

    def time_of(self, parameters: Parameters) -> Callable[[tuple[int, ...]], float]:
        """Seconds of a step as a function of the cuts; infinite where they do not fit."""
        orders = looped(self.ranks, self.microbatches, parameters)
        stage_ranks = round_robin(self.ranks, parameters.loops)

        def seconds(cuts: tuple[int, ...]) -> float:
            outcome = simulate(self.graph, self.machine, cuts, stage_ranks, orders)
            fits = outcome is not None and outcome.fits(self.machine.device_of(0).memory_bytes)
            return outcome.makespan_s if outcome is not None and fits else float("inf")

        return seconds

    def even_cuts(self, loops: int = 1) -> tuple[int, ...]:
        """Equal-time cuts."""
        return equal_time_cuts(self.graph, self.ranks * loops)

    def uneven_cuts(self, parameters: Parameters) -> tuple[int, ...]:
        """Cuts found for this order."""
        even = self.even_cuts(parameters.loops)
        return descend(self.time_of(parameters), even, len(self.graph.nodes))[1]

    def one_loop(self, prefetch: int) -> Parameters:
        """1F1B with as much prefetch."""
        return Parameters(loops=1, per_loop=self.microbatches, prefetch=prefetch)


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Seconds of a step of 1F1B, one stage a rank."""

    even_s: float
    even_prefetch_s: float
    uneven_s: float  #: cuts for 1F1B without prefetch
    uneven_prefetch_s: float  #: cuts for 1F1B with prefetch
    uneven_prefetch_cuts: tuple[int, ...]
    same_cuts_without_prefetch_s: float

    @property
    def without_s(self) -> float:
        """The best without prefetch."""
        return min(self.even_s, self.uneven_s)

    @property
    def prefetch_gain(self) -> float:
        """What prefetch saves, slicing chosen for each."""
        return 1 - self.uneven_prefetch_s / self.without_s


@dataclass(frozen=True, kw_only=True)
class Looping:
    """Seconds of a step of the looped order with all prefetch; the better of both block sizes."""

    loops: int
    even_s: float
    uneven_s: float


def setting(ranks: int, microbatches: int) -> Setting:
    """ViT-g/14 on so many ranks."""
    graph, machine = read_cost_file(GRAPH)
    return Setting(graph=graph, machine=machine, ranks=ranks, microbatches=microbatches)


def slicing(where: Setting) -> Slicing:
    """Even and uneven cuts with and without prefetch."""
    without, prefetched = where.one_loop(0), where.one_loop(where.ranks - 1)
    even = where.even_cuts()
    cuts = where.uneven_cuts(prefetched)
    return Slicing(
        even_s=where.time_of(without)(even),
        even_prefetch_s=where.time_of(prefetched)(even),
        uneven_s=where.time_of(without)(where.uneven_cuts(without)),
        uneven_prefetch_s=where.time_of(prefetched)(cuts),
        uneven_prefetch_cuts=cuts,
        same_cuts_without_prefetch_s=where.time_of(without)(cuts),
    )


def looping(where: Setting, loops: int, *, search: bool = True) -> Looping:
    """Several stages a rank, with even cuts and, if asked for, with cuts found for the order."""
    choices = [
        Parameters(loops=loops, per_loop=per_loop, prefetch=where.ranks - 1)
        for per_loop in sorted({min(where.ranks, where.microbatches), where.microbatches})
    ]
    even = where.even_cuts(loops)
    even_s = min(where.time_of(parameters)(even) for parameters in choices)
    found = [where.time_of(parameters)(where.uneven_cuts(parameters)) for parameters in choices] if search else []
    return Looping(loops=loops, even_s=even_s, uneven_s=min([even_s, *found]))


def markdown(found: Sequence[tuple[Setting, Slicing, Sequence[Looping]]], command: str) -> str:
    """The document."""
    lines = [
        "# The paper's findings on ViT-g/14",
        "",
        "Milliseconds of one step of `zoo/benchmarks/graphs/vit_g14_mb24.json.gz` by",
        "`zoo/benchmarks/event_simulator.py`. *Even*: equal-time cuts. *Uneven*: cuts found by descent for the order",
        "they are run with, so that each order is shown at its best. *Same cuts, no prefetch*: the cuts that are best",
        "with prefetch, run without it. Prefetch is all of it (ranks - 1).",
        "",
        "## One stage a rank (1F1B)",
        "",
        "| ranks | micro-batches | even | even, prefetch | uneven | uneven, prefetch | same cuts, no prefetch "
        "| prefetch gains |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for where, one, _ in found:
        times = (one.even_s, one.even_prefetch_s, one.uneven_s, one.uneven_prefetch_s, one.same_cuts_without_prefetch_s)
        cells = " | ".join(_ms(seconds) for seconds in times)
        lines.append(f"| {where.ranks} | {where.microbatches} | {cells} | {one.prefetch_gain:.1%} |")
    lines += [
        "",
        "Uneven slicing with prefetch beats even slicing with and without it, everywhere. The same cuts without",
        "prefetch lose against even ones wherever there are more micro-batches than ranks. Even slicing gains next to",
        "nothing by prefetch: it is the two together that gain.",
        "",
        "## Several stages a rank (looped, with prefetch)",
        "",
        "| ranks | micro-batches | loops | even | uneven | looping gains, over one loop uneven with prefetch |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for where, one, several in found:
        for row in several:
            gain = f"{1 - row.uneven_s / one.uneven_prefetch_s:.1%}"
            cells = f"{_ms(row.even_s)} | {_ms(row.uneven_s)} | {gain}"
            lines.append(f"| {where.ranks} | {where.microbatches} | {row.loops} | {cells} |")
    return "\n".join([*lines, "", f"Python {platform.python_version()}. Generated by:", "", f"    {command}", ""])


def _ms(seconds: float) -> str:
    return "does not fit" if seconds == float("inf") else f"{seconds * 1e3:.1f}"


def main() -> None:
    """Find all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--out", type=Path, help="where to write the tables")
    options = parser.parse_args()
    found = []
    for ranks in options.ranks:
        for microbatches in options.microbatches:
            where = setting(ranks, microbatches)
            found.append((where, slicing(where), [looping(where, loops) for loops in (2, 3)]))
            print(f"{ranks} ranks, {microbatches} micro-batches done", file=sys.stderr, flush=True)
    text = markdown(found, " ".join(["python zoo/benchmarks/paper_findings.py", *sys.argv[1:]]))
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
