"""Does the search find the best plan of the known families? Brute force on random small graphs says.

    python zoo/benchmarks/brute_force.py [--graphs 200] [--seed 0] [--out docs/benchmarks/brute_force.md]

Up to 14 operations, 3 ranks, 4 micro-batches; skips, masks, links and half of them with a tight memory limit. Tried:
all cuts with gpipe, 1F1B with every prefetch, and the looped order with every number of loops, every number of
micro-batches per loop and every prefetch; stage s on rank s mod D. All are simulated by `event_simulator`, our plan
too. Cuts are left out where the work of one rank alone takes longer than the best plan so far: they hold no better one.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import numpy
from baselines import baselines
from event_simulator import simulate_layout
from pipeline_layout import Layout
from pipeline_orders import Orders, Parameters, gpipe, looped, round_robin
from plan_judging import Judged, judge
from random_graphs import random_machine, small_graph

from pfeife_accelerate.ir import CostGraph, Machine
from pfeife_accelerate.planner import SearchOptions

__all__ = ["Problem", "Result", "optimum_s", "problem_of", "result_of"]

_EQUAL = 1e-9


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a plan is wanted for."""

    graph: CostGraph
    machine: Machine
    ranks: int
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The best plan of the families, and ours."""

    seed: int
    problem: Problem
    optimum_s: float
    seconds: float  #: that brute force took
    ours: Judged

    @property
    def ratio(self) -> float:
        """Ours over the optimum; below 1 where an order outside the families is better."""
        return self.ours.makespan_s / self.optimum_s

    @property
    def is_optimal(self) -> bool:
        """Whether none of the families is better."""
        return self.ratio <= 1 + _EQUAL

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with our plan; a bound above the optimum is no bound."""
        if self.ours.bound_s > self.optimum_s * (1 + _EQUAL):
            return (*self.ours.problems, f"bound {self.ours.bound_s:.6g} s above the optimum {self.optimum_s:.6g} s")
        return self.ours.problems


def problem_of(seed: int) -> Problem:
    """A small random graph that fits at least one way."""
    rng = random.Random(f"problem {seed}")
    graph = small_graph(seed)
    ranks, microbatches = rng.choice((2, 2, 3)), rng.randint(1, 4)
    machine = random_machine(seed)
    if rng.random() < 0.5:
        found = baselines(graph, machine, ranks, microbatches)
        least = min(max(baseline.outcome.peak_bytes) for baseline in found)
        machine = random_machine(seed, memory_bytes=int(least * rng.uniform(1.0, 1.4)))
    return Problem(graph=graph, machine=machine, ranks=ranks, microbatches=microbatches)


def family_orders(ranks: int, microbatches: int, loops: int) -> tuple[Orders, ...]:
    """Every order of every family with this many loops, each once."""
    orders = [gpipe(ranks, microbatches, loops)]
    for per_loop in range(1, microbatches + 1):
        for prefetch in range(ranks):
            orders.append(looped(ranks, microbatches, Parameters(loops=loops, per_loop=per_loop, prefetch=prefetch)))
    return tuple(dict.fromkeys(orders))


def optimum_s(problem: Problem) -> float:
    """The time of the best plan of the families that fits."""
    graph, machine, ranks = problem.graph, problem.machine, problem.ranks
    limit_bytes = machine.device_of(0).memory_bytes
    orders: dict[int, tuple[Orders, ...]] = {}
    best_s = float("inf")
    for least_s, cuts in sorted(_all_cuts(problem)):
        if least_s >= best_s:
            break
        loops = (len(cuts) + 1) // ranks
        if loops not in orders:
            orders[loops] = family_orders(ranks, problem.microbatches, loops)
        layout = Layout(graph, cuts, round_robin(ranks, loops), ranks)
        if max(layout.static_bytes) > limit_bytes:
            continue
        for order in orders[loops]:
            outcome = simulate_layout(layout, machine, order)
            if outcome is not None and outcome.fits(limit_bytes):
                best_s = min(best_s, outcome.makespan_s)
    return best_s


def _all_cuts(problem: Problem) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All cuts with the time that no order of them can go below: the work of the busiest rank."""
    graph, ranks = problem.graph, problem.ranks
    work = [0.0, *accumulate(problem.microbatches * (node.forward_s + node.backward_s) for node in graph.nodes)]
    for loops in range(1, len(graph.nodes) // ranks + 1):
        for cuts in combinations(range(1, len(graph.nodes)), ranks * loops - 1):
            stages = [work[last] - work[first] for first, last in pairwise((0, *cuts, len(graph.nodes)))]
            yield max(sum(stages[rank::ranks]) for rank in range(ranks)), cuts


def result_of(seed: int) -> Result:
    """Brute force, and our plan."""
    problem = problem_of(seed)
    start_s = time.perf_counter()
    best_s = optimum_s(problem)
    seconds = time.perf_counter() - start_s
    options = SearchOptions(memory_fraction=1.0)
    ours = judge(problem.graph, problem.machine, problem.ranks, problem.microbatches, options)
    return Result(seed=seed, problem=problem, optimum_s=best_s, seconds=seconds, ours=ours)


def markdown(results: Sequence[Result], command: str) -> str:
    """The document."""
    optimal, better = [r for r in results if r.is_optimal], [r for r in results if r.ratio < 1 - _EQUAL]
    worst = max(results, key=lambda result: result.ratio)
    limited = [r for r in results if r.problem.machine.device_of(0).memory_bytes < 2**50]
    rows = [
        ("graphs", f"{len(results)}, {len(limited)} of them with a tight memory limit"),
        ("no plan of the families is better", f"{len(optimal)} ({len(optimal) / len(results):.1%})"),
        ("... of those with the limit", f"{sum(r.is_optimal for r in limited)} of {len(limited)}"),
        ("ours is better than all of the families", str(len(better))),
        ("worst ratio", f"{worst.ratio:.4f} (seed {worst.seed})"),
        ("geometric mean of the ratios", f"{statistics.geometric_mean(r.ratio for r in results):.4f}"),
        ("seconds of brute force", f"{sum(r.seconds for r in results):.0f}"),
        ("seconds of planning", f"{sum(r.ours.planning_s for r in results):.1f}"),
    ]
    missed = sorted((r for r in results if not r.is_optimal), key=lambda result: -result.ratio)
    lines = [
        "# Brute force",
        "",
        "Random graphs of up to 14 operations, up to 3 ranks and 4 micro-batches: our plan against the best of all",
        "cuts with all orders of all families, everything simulated by `zoo/benchmarks/event_simulator.py`.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        *(["", "Missed:", ""] if missed else []),
        *(f"- seed {r.seed}: {len(r.problem.graph.nodes)} operations, {r.problem.ranks} ranks, "
          f"{r.problem.microbatches} micro-batches: {r.ratio:.4f}" for r in missed),
        *(f"- seed {r.seed}: {problem}" for r in results for problem in r.problems),
        "",
        f"Python {platform.python_version()}, numpy {numpy.__version__}, {platform.machine()}. Generated by:",
        "",
        f"    {command}",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Compare; 1 where fewer than 95 % are optimal, one is more than 2 % off, or a plan breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        results = list(pool.map(result_of, range(options.seed, options.seed + options.graphs)))
    text = markdown(results, " ".join(["python zoo/benchmarks/brute_force.py", *sys.argv[1:]]))
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    optimal = sum(result.is_optimal for result in results) / len(results)
    wrong = any(result.problems or result.ratio > 1.02 for result in results)
    return int(wrong or optimal < 0.95)


if __name__ == "__main__":
    raise SystemExit(main())
