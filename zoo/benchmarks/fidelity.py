"""The fidelity sweep: every case as one plain process and as a pipeline, and a table of how they differ.

    python zoo/benchmarks/fidelity.py [--quick] [--ranks 2,3] [--only PATTERN] [--pending] [--out docs/fidelity.md]

Models: the promise that a pipeline computes what one process computes. Ignores: how long it takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from fidelity_cases import CASES
from fidelity_compare import TOLERANCES, Comparison, Tolerance, compare
from fidelity_kit import Case
from fidelity_launch import Launches, choose
from fidelity_table import Row, markdown, order_of, summary


def main() -> int:
    """Run what the command line asks for; 1 if any case differs or fails."""
    options = _parser().parse_args()
    ranks = [int(size) for size in options.ranks.split(",")]
    chosen = choose(quick=options.quick, ranks=ranks, pattern=options.only, pending=options.pending)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        launches = Launches(folder, chosen, options.case_limit)
        rows = [judged(launches, case, size) for size in ranks for case in chosen if size in case.ranks]
        for (size, launch), wall_s in sorted(launches.wall_s.items()):
            print(f"{size} processes, {launch}: {wall_s:.0f} s")
    if not options.pending:
        rows += [
            Row(case=case, size=min(case.ranks))
            for case in choose(quick=options.quick, ranks=ranks, pattern=options.only, pending=True)
            if case.pending
        ]
    for row in rows:
        if row.kind not in ("equal", "equal as stated"):
            print(f"{row.case.name} on {row.size}: {row.verdict}")
            for problem in row.comparison.problems[1:4] if row.comparison else ():
                print(f"    {problem}")
    print(summary(rows))
    if options.out:
        Path(options.out).write_text(markdown(rows, _command(options)), encoding="utf-8")
    return int(any(row.kind in ("fails", "differs") for row in rows))


def judged(launches: Launches, case: Case, size: int) -> Row:
    """Run a case, if that has not been done, and compare."""
    plain, ranks = launches.plain(case), launches.records(case, size)
    if plain is None:
        return Row(case=case, size=size, failure=f"as one plain process: {launches.failures[case.name, 1]}")
    if ranks is None:
        return Row(case=case, size=size, failure=launches.failures[case.name, size])
    kinds = sorted({str(kind) for rank in ranks for kind in rank["order"]})  # type: ignore[attr-defined]
    return Row(case=case, size=size, comparison=compared(case, plain, ranks), order=order_of(kinds))


def compared(case: Case, plain: dict[str, object], ranks: list[dict[str, object]]) -> Comparison:
    """What the ranks recorded against what the plain process did, in the case's tolerance."""
    allowed = TOLERANCES[case.dtype]
    if case.tolerance is not None:
        allowed = Tolerance(case.tolerance, case.tolerance)
    return compare(plain, ranks, allowed)


def _command(options: argparse.Namespace) -> str:
    """The command that makes the same table anew."""
    words = ["python", "zoo/benchmarks/fidelity.py"]
    words += [f"--{name}" for name in ("quick", "pending") if getattr(options, name)]
    words += [
        f"--ranks {options.ranks}",
        f"--only '{options.only}'" if options.only else "",
        f"--out {_from_root(options.out)}",
    ]
    return " ".join(word for word in words if word)


def _from_root(path: str) -> str:
    """The path as seen from the repository, where it is in there."""
    whole, root = Path(path).resolve(), Path(__file__).resolve().parents[2]
    return str(whole.relative_to(root)) if whole.is_relative_to(root) else path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="only the cases that the tests run")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, with commas between")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression of case names")
    parser.add_argument("--pending", action="store_true", help="also run cases that are not expected to hold yet")
    parser.add_argument("--case-limit", type=float, default=300.0, metavar="S", help="seconds a case may take")
    parser.add_argument("--folder", help="keep records here, and use those that are here")
    parser.add_argument("--out", help="write the table here, as Markdown")
    return parser


if __name__ == "__main__":
    assert CASES
    sys.exit(main())
