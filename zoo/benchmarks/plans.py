"""Our plans beside the peers' plans and a strong baseline, with the gap to the bound.

    python zoo/benchmarks/plans.py [--graphs vit_g14_mb24 ...] [--ranks 2 4 8] [--microbatches 4 8 16 32] [--out FILE]
    python zoo/benchmarks/plans.py --random 100 [--seed 0] [--out FILE]

Every row is simulated by `event_simulator`. Without `--out` the table is printed. Fails (exit status 1) where a plan of
ours is slower than the best of the others, or breaks a promise of the planner.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from baselines import baselines, best_fitting
from plan_judging import judge
from plans_table import Row, markdown
from random_graphs import random_graph, random_machine

from pfeife_accelerate.ir import CostGraph, Machine, read_cost_file
from pfeife_accelerate.planner import SearchOptions

HERE = Path(__file__).parent
GRAPHS = HERE / "graphs"
RAISED_BYTES = 80 * 2**30
OPTIONS = SearchOptions(memory_fraction=1.0)
_NOT_PEERS = ("graph", "ranks", "microbatches", "memory_gib", "bound", "bound_one_stage")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be made; a random graph has no name of a file but a seed."""

    file: str = ""
    seed: int = -1
    ranks: int
    microbatches: int
    split: bool


def peers_s(graph: str, ranks: int, microbatches: int, limit_bytes: int) -> dict[str, float]:
    """The peers' plans that fit: a starred time belongs to a plan that exceeds the memory that its row was made for."""
    with (HERE / "peer_plans.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["graph"], int(row["ranks"]), int(row["microbatches"])) == (graph, ranks, microbatches):
                # With more memory than the row was made for, a starred plan may fit: it counts, to our disadvantage.
                counts = ("", "*") if limit_bytes > int(row["memory_gib"]) * 2**30 else ("",)
                found = {name: text for name, text in row.items() if name not in _NOT_PEERS and text}
                return {
                    name: float(text.rstrip("*")) / 1e3
                    for name, text in found.items()
                    if text[len(text.rstrip("*")) :] in counts
                }
    return {}


def with_memory(machine: Machine, memory_bytes: int) -> Machine:
    """The same machine with as much memory on each device."""
    return replace(machine, devices=tuple(replace(device, memory_bytes=memory_bytes) for device in machine.devices))


def row_of(case: Case) -> Row:
    """Simulate the others, plan, simulate the plan."""
    graph, machine = _read(case)
    found = list(baselines(graph, machine, case.ranks, case.microbatches))
    limit = machine.device_of(0).memory_bytes
    if case.seed >= 0:  # between what the leanest member of the baseline needs and more than enough
        least = min(max(baseline.outcome.peak_bytes) for baseline in found)
        limit = int(least * random.Random(case.seed).uniform(1.0, 2.5))
    raised = best_fitting(found, limit) is None
    limit = RAISED_BYTES if raised else limit
    machine = with_memory(machine, limit)
    whole, split = OPTIONS, replace(OPTIONS, backward="split")
    return Row(
        graph=graph.name,
        ranks=case.ranks,
        microbatches=case.microbatches,
        limit_bytes=limit,
        raised=raised,
        baseline=best_fitting(found, limit),
        peers_s=peers_s(graph.name, case.ranks, case.microbatches, limit),
        whole=judge(graph, machine, case.ranks, case.microbatches, whole),
        split=judge(graph, machine, case.ranks, case.microbatches, split) if case.split else None,
    )


def _read(case: Case) -> tuple[CostGraph, Machine]:
    if case.seed >= 0:
        return random_graph(case.seed), random_machine(case.seed)
    return read_cost_file(GRAPHS / f"{case.file}.json.gz")


def named_cases(graphs: list[str], ranks: list[int], microbatches: list[int], split: bool) -> Iterator[Case]:
    """Every graph with every number of ranks and micro-batches."""
    for graph in graphs:
        for size in ranks:
            for number in microbatches:
                yield Case(file=graph, ranks=size, microbatches=number, split=split)


def random_cases(number: int, first_seed: int, split: bool) -> Iterator[Case]:
    """Random graphs on random numbers of ranks, also those that do not divide the micro-batches."""
    for seed in range(first_seed, first_seed + number):
        rng = random.Random(f"case {seed}")
        ranks = rng.choice((2, 3, 4, 4, 6, 8))
        yield Case(seed=seed, ranks=ranks, microbatches=rng.choice((4, 6, 8, 12, 16, 24, 32)), split=split)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.name.split(".")[0] for path in GRAPHS.glob("*.json.gz"))
    parser.add_argument("--graphs", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random graphs instead of the named ones")
    parser.add_argument("--seed", type=int, default=0, help="of the first random graph")
    parser.add_argument("--no-split", dest="split", action="store_false", help="whole backwards only")
    parser.add_argument("--processes", type=int, default=1, help="more of them lengthen the stated planning times")
    parser.add_argument("--out", type=Path, help="where to write the table")
    return parser.parse_args()


def main() -> int:
    """Make the table; 1 where it shows something wrong."""
    options = _arguments()
    if options.random:
        cases = list(random_cases(options.random, options.seed, options.split))
    else:
        cases = list(named_cases(options.graphs, options.ranks, options.microbatches, options.split))
    rows: list[Row] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for row in pool.map(row_of, cases):
            rows.append(row)
            print(
                f"{row.graph} {row.ranks} x {row.microbatches}: {row.ratio:.4f} of the others, gap {row.gap - 1:.1%}, "
                f"{row.whole.planning_s:.1f} s {' '.join(row.problems)}",
                file=sys.stderr,
                flush=True,
            )
    title = "Plans on random graphs" if options.random else "Plans"
    text = markdown(rows, " ".join(["python zoo/benchmarks/plans.py", *sys.argv[1:]]), title)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(row.problems or row.is_above for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
