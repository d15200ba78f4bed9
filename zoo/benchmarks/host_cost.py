"""What the host pays for a step beside the model's own work: trivial stages, this package and torch's pipelining.

    python zoo/benchmarks/host_cost.py [--rounds 20] [--steps 5] [--microbatches 64] [--out FILE.md]

Eight linear layers of width 8 on two ranks with one thread each, one row a micro-batch, AdamW's step included. All
contestants are started once and take turns; medians over all steps. The second table is the time from the call of
`backward` (on whichever rank calls it last) to the first stage's first operation. Models: processes over gloo, as users
run them. Ignores: models whose stages take time (`peers.py`). Fails (exit status 1) where a target is missed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from peers_entries import ORDERS, ours, pipelining
from peers_turns import Contestant, one_thread_each, started

__all__ = ["FIRST_OPERATION_S", "PEER_RATIO", "Measured", "markdown"]

OURS = "pfeife_accelerate"
PEERS = ("GPipe", "1F1B", "Interleaved1F1B", "ZBV")
UNITS = 8
PEER_RATIO, FIRST_OPERATION_S = 0.8, 2e-3
WARM_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that a run found out."""

    microbatches: int
    step_s: dict[str, float]  #: median step of each contestant
    failures: dict[str, str]
    first_operation_s: dict[int, float]  #: by the number of micro-batches
    plan: str

    @property
    def best_peer(self) -> str:
        """Of torch's schedules the one with the shortest step."""
        return min((name for name in self.step_s if name != OURS), key=self.step_s.__getitem__)

    @property
    def ratio(self) -> float:
        """Our step over the best peer's."""
        return self.step_s[OURS] / self.step_s[self.best_peer]

    @property
    def reaches_targets(self) -> bool:
        """Whether both promises are kept."""
        return self.ratio <= PEER_RATIO and max(self.first_operation_s.values(), default=0.0) <= FIRST_OPERATION_S


def measure(options: argparse.Namespace, folder: Path) -> Measured:
    """Run everything."""
    number = options.microbatches
    entries = [ours(OURS, number, folder / "cache")]
    entries += [pipelining(order, number, _bounds(order)) for order in PEERS]
    with started(entries, ("tiny", number), folder, warm_up=_warm_up) as (playing, failures):
        steps: dict[str, list[float]] = {name: [] for name in playing}
        for _ in range(options.rounds):
            for name, contestant in playing.items():
                steps[name] += [record.seconds for record in contestant.steps(options.steps)]
        seconds = {name: statistics.median(found) for name, found in steps.items()}
        if len(playing) < 2 or OURS not in playing:
            raise SystemExit("; ".join(failures.values()))
        told = playing[OURS].ask("plan")[0]
        plan = f"{told['family']}, {told['num_stages']} stages"
    first = {m: _first_operation_s(m, folder, options.rounds) for m in options.first_operation}
    return Measured(microbatches=number, step_s=seconds, failures=failures, first_operation_s=first, plan=plan)


def _bounds(order: str) -> list[int]:
    stages = 2 * ORDERS[order].per_rank
    return [UNITS * stage // stages for stage in range(stages + 1)]


def _warm_up(contestant: Contestant) -> None:
    contestant.steps(WARM_STEPS)


def _first_operation_s(microbatches: int, folder: Path, steps: int) -> float:
    """Median seconds from the last rank's call of `backward` to the first operation."""
    entry = ours(OURS, microbatches, folder / "cache")
    with started([entry], ("tiny", microbatches), folder, warm_up=_warm_up) as (playing, failures):
        if failures:
            raise SystemExit(failures[OURS])
        contestant = playing[OURS]
        contestant.ask("watch_first_operation")
        found = []
        for _ in range(steps):
            contestant.steps(2)
            moments = contestant.ask("last_moments")
            first_s = min(first for _, first in moments if first > 0)
            found.append(first_s - max(call for call, _ in moments))
        return statistics.median(found)


def markdown(found: Measured, command: str) -> str:
    """The document."""
    lines = [
        "# Host cost",
        "",
        f"Eight linear layers of width 8, two ranks, one thread each, {found.microbatches} micro-batches of one row,",
        "AdamW's step included; all take turns in one run, medians over all steps.",
        "",
        "| | ms a step | ms a step and micro-batch |",
        "|---|--:|--:|",
    ]
    lines += [
        f"| {name} | {1e3 * seconds:.1f} | {1e3 * seconds / found.microbatches:.3f} |"
        for name, seconds in sorted(found.step_s.items(), key=lambda item: item[1])
    ]
    lines += [f"| {name} | failed: {why} | |" for name, why in found.failures.items()]
    lines += ["", f"Our plan: {found.plan}. Ours over the best peer ({found.best_peer}): {found.ratio:.2f}"]
    lines[-1] += f" (target: at most {PEER_RATIO})."
    lines += ["", "From the call of `backward` to the first operation, ms", "(target: at most 2):", ""]
    lines += ["| micro-batches | ms |", "|--:|--:|"]
    lines += [f"| {number} | {1e3 * seconds:.2f} |" for number, seconds in found.first_operation_s.items()]
    versions = f"Python {platform.python_version()}, torch {version('torch')}, {platform.machine()}."
    return "\n".join([*lines, "", f"{versions} Generated by:", "", f"    {command}", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of each contestant in each round")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--first-operation", nargs="*", type=int, default=[4, 64, 512])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    one_thread_each()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    text = markdown(found, " ".join(["python zoo/benchmarks/host_cost.py", *sys.argv[1:]]))
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return int(not found.reaches_targets)


if __name__ == "__main__":
    raise SystemExit(main())
