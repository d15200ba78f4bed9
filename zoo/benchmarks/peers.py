r"""Training tools side by side: this package, torch's pipelining, DeepSpeed, DDP, FSDP2 and plain training.

    python zoo/benchmarks/peers.py --model vit llama resnet unet --microbatches 4 8 --rounds 5
    python zoo/benchmarks/peers.py --model vit --microbatches 8 --find-splits 3
    python zoo/benchmarks/peers.py --render

A cell is a model at a number of micro-batches. Its contestants are started one after the other and then take turns, of
three steps, of which the first does not count; every one does `--full-rounds` rounds, and what is compared by targets
does all `--rounds`: plain, ours, and the pipeline peers that are nearly as fast as the fastest (without full rounds,
the steps of warming up tell). As a process keeps the memory that it got at its start, all that is compared starts
`--starts` times, in another order each time, and the steps of all starts count together. Cells are kept in a JSON file,
from which the document is made. What does not depend on micro-batches (DDP, FSDP2, ours on auto) takes part in the
first cell of a model. With `--find-splits`, several splits by hand are tried for each peer, and the best is kept for
later runs.
DeepSpeed is optional, and may be in a folder of its own, given by `--deepspeed FOLDER`:

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target FOLDER deepspeed hjson ninja py-cpuinfo msgpack \
        einops pydantic pydantic-core annotated-types typing-inspection

Models: steps on one machine, as users run them. Ignores: several machines. Fails (exit status 1) where a target is
missed.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from even_memory import even_memory
from peers_entries import (
    LARGE_PAGES_NAME,
    ORDERS,
    deepspeed,
    ours,
    pipelining,
    plain,
    profile,
    replicated,
    with_large_pages,
)
from peers_rank import Entry
from peers_record import ACCUMULATION, AUTO, FIXED, PIPELINES, PLAIN, Cell, Found, Store, surroundings
from peers_split import best_bounds
from peers_table import markdown, rich_table
from peers_turns import Contestant, Failure, one_thread_each, started
from rich.console import Console

BATCH_STATISTICS = ("resnet",)
MODELS = ("vit", "llama", "resnet", "unet", "tiny")
#: A peer that is slower than the fastest by more than this is not measured in every round.
NEARLY = 1.15
#: That count, of each turn.
_STEPS = 2
ALWAYS = (PLAIN, ACCUMULATION, FIXED, AUTO)


class Turns:
    """The steps of one cell's contestants."""

    def __init__(self) -> None:
        self.losses: dict[str, tuple[float, ...]] = {}
        self.warm_s: dict[str, float] = {}
        self.seconds: dict[str, list[float]] = {}

    def warm_up(self, contestant: Contestant) -> None:
        """Two steps: the first one prepares, the second one finds out what memory steps need."""
        records = contestant.steps(1)
        contestant.ask("forget the peak")
        records += contestant.steps(1)
        self.warm_s[contestant.entry.name] = records[-1].seconds
        self.losses[contestant.entry.name] = tuple(record.loss for record in records if record.loss is not None)

    def play(self, playing: Mapping[str, Contestant], rounds: int, full_rounds: int) -> dict[str, str]:
        """All rounds; who fails on the way, and why. Who does none keeps the second step of its warming up."""
        self.seconds = {name: [] for name in playing}
        failures: dict[str, str] = {}
        for number in range(max(rounds, full_rounds)):
            names = [n for n in (playing if number < full_rounds else self.compared()) if n not in failures]
            for name in names if number % 2 == 0 else reversed(names):
                try:
                    # Its first step finds nothing in the caches: in a training, one step follows another.
                    self.seconds[name] += [record.seconds for record in playing[name].steps(1 + _STEPS)[1:]]
                except Failure as failure:
                    failures[name] = str(failure)
        self.seconds = {name: found or [self.warm_s[name]] for name, found in self.seconds.items()}
        return failures

    def compared(self) -> list[str]:
        """Those whose steps decide about a target."""
        medians = {name: statistics.median(found or [self.warm_s[name]]) for name, found in self.seconds.items()}
        fastest_s = min((medians[name] for name in PIPELINES if name in medians), default=0.0)
        near = [name for name in PIPELINES if name in medians and medians[name] <= NEARLY * fastest_s]
        return [name for name in self.seconds if name in ALWAYS or name in near or name.endswith(LARGE_PAGES_NAME)]


def measure(options: argparse.Namespace, model: str, number: int, folder: Path, store: Store) -> Cell:
    """One cell."""
    bounds = {order: splits[0] for order, splits in splits_of(options, model, number, folder, store).items()}
    entries = list(contestants(options, model, number, folder, bounds))
    found: dict[str, Found] = {}
    failures: dict[str, str] = {}
    for start in range(options.starts):
        first = start * len(entries) // options.starts
        in_turn, full_rounds = entries[first:] + entries[:first], options.rounds if start else options.full_rounds
        new, failed, compared = one_start(in_turn, options, model, folder, full_rounds=full_rounds)
        for name, values in new.items():
            found[name] = found[name].and_then(values) if name in found else values
        failures |= failed
        entries = [entry for entry in entries if entry.name in compared and entry.name not in failures]
    return Cell(
        model=model,
        rows=options.rows,
        num_microbatches=number,
        has_batch_statistics=model in BATCH_STATISTICS,
        found={name: values for name, values in found.items() if name not in failures},
        failures=failures,
        command=command_line(options),
        surroundings=surroundings(options.deepspeed),
    )


def one_start(
    entries: Sequence[Entry], options: argparse.Namespace, model: str, folder: Path, *, full_rounds: int
) -> tuple[dict[str, Found], dict[str, str], list[str]]:
    """What processes find that are started once; who fails; and who is worth another start."""
    turns = Turns()
    starting = started(entries, (model, options.rows), folder, warm_up=turns.warm_up)
    with even_memory(), starting as (playing, failures):
        failures |= turns.play(playing, options.rounds, full_rounds)
        found = {
            name: Found(
                seconds=tuple(turns.seconds[name]),
                losses=turns.losses[name],
                peak_mb=tuple(contestant.ask("peak")),
                bounds=contestant.entry.options.get("bounds", ()),
                plan=contestant.ask("plan")[0] if name in (FIXED, AUTO) else {},
            )
            for name, contestant in playing.items()
            if name not in failures
        }
    return found, failures, turns.compared()


def contestants(
    options: argparse.Namespace, model: str, number: int, folder: Path, bounds: Mapping[str, tuple[int, ...]]
) -> Iterator[Entry]:
    """Who takes part in a cell, in the order of turns."""
    cache = options.cache or folder / "cache"
    every = [plain(None), plain(number), ours(FIXED, number, cache)]
    if number == options.microbatches[0]:
        every += [ours(AUTO, None, cache), replicated("DDP"), replicated("FSDP2")]
    every += [pipelining(order, number, bounds[order]) for order in ORDERS]
    every += [with_large_pages(pipelining(order, number, bounds[order])) for order in ("1F1B", "Interleaved1F1B")]
    every.append(deepspeed(number, bounds["1F1B"], options.deepspeed))
    return (entry for entry in every if not options.only or entry.name in options.only)


def splits_of(
    options: argparse.Namespace, model: str, number: int, folder: Path, store: Store
) -> dict[str, list[tuple[int, ...]]]:
    """For each of torch's schedules, the best splits by hand: the one found by trying, or those balanced by time."""
    tried = options.find_splits or 1
    known = {order: store.split(f"{model}/{number}", order) for order in ORDERS}
    if tried == 1 and all(known.values()):
        return {order: [split] for order, split in known.items() if split}
    with started([profile(number)], (model, options.rows), folder, warm_up=lambda _: None) as (playing, failures):
        if failures:
            raise SystemExit("; ".join(failures.values()))
        (seconds,) = playing["profile"].ask("unit_seconds")
    return {
        order: [known[order]] if tried == 1 and known[order] else best_bounds(seconds, shape.ranks(2), number, tried)
        for order, shape in ORDERS.items()
    }


def find_splits(options: argparse.Namespace, model: str, number: int, folder: Path, store: Store) -> None:
    """Try several splits for each of torch's schedules, and keep the fastest."""
    for order, candidates in splits_of(options, model, number, folder, store).items():
        entries = [pipelining(order, number, bounds, f"{order} {bounds}") for bounds in candidates]
        turns = Turns()
        with started(entries, (model, options.rows), folder, warm_up=turns.warm_up) as (playing, failures):
            turns.play(playing, 2, 2)
            fastest = min(playing, key=lambda name: min(turns.seconds[name]), default=None)
            for name in playing:
                print(f"{model}/{number} {name}: {min(turns.seconds[name]):.3f} s", flush=True)
            if fastest is not None:
                store.add_split(f"{model}/{number}", order, playing[fastest].entry.options["bounds"])
        for why in failures.values():
            print(why, flush=True)


def command_line(options: argparse.Namespace) -> str:
    """What was run, without folders of this machine."""
    parts = ["python zoo/benchmarks/peers.py --model", *options.model, "--microbatches"]
    parts += [*map(str, options.microbatches), "--rows", str(options.rows), "--rounds", str(options.rounds)]
    parts += ["--full-rounds", str(options.full_rounds), "--starts", str(options.starts)]
    parts += ["--only", *map(shlex.quote, options.only)] if options.only else []
    return " ".join([*parts, *(["--deepspeed FOLDER"] if options.deepspeed else [])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; 1 where a target is missed."""
    options = _parser().parse_args(arguments)
    store, document = Store(options.data), options.data.with_suffix(".md")
    one_thread_each()
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        for model in () if options.render else options.model:
            for number in options.microbatches:
                if options.find_splits:
                    find_splits(options, model, number, Path(temporary), store)
                    continue
                cell = measure(options, model, number, Path(temporary), store)
                store.add(cell)
                document.write_text(markdown(store.cells()), encoding="utf-8")
                console.print(rich_table(cell))
                for check in cell.checks():
                    met = "met" if check.is_met else "MISSED"
                    print(f"{cell.key} {check.name}: {check.reached:.3f}, target {check.target:g}: {met}", flush=True)
    document.write_text(markdown(store.cells()), encoding="utf-8")
    return int(any(not check.is_met for cell in store.cells() for check in cell.checks()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS[:-1]))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--rows", type=int, default=8, help="of the batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full-rounds", type=int, default=1, help="rounds of all contestants")
    parser.add_argument("--starts", type=int, default=3, help="of all that is compared, with so many rounds each")
    parser.add_argument("--only", nargs="+", help="names of contestants")
    parser.add_argument(
        "--find-splits", type=int, default=0, metavar="N", help="try N splits for each peer, and no more"
    )
    parser.add_argument("--cache", type=Path, help="where ours keeps measurements and plans (default: for this run)")
    parser.add_argument("--deepspeed", type=Path, help="folder where DeepSpeed is installed")
    parser.add_argument("--data", type=Path, default=Path("docs/benchmarks/peers.json"))
    parser.add_argument("--render", action="store_true", help="only make the document from the data")
    return parser


if __name__ == "__main__":
    sys.exit(main())
