"""The promise of exactness: what a script computes in one plain process it computes as a pipeline, step by step.

The oracle is the same script as one plain process, without the plug-in. Many cases run in one launch, because starting
processes costs more than the cases; each is reported by its name. The cases are `zoo/benchmarks/fidelity_cases_*.py`,
and `python zoo/benchmarks/fidelity.py` writes all of them into a table.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "zoo" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from fidelity import judged  # noqa: E402
from fidelity_cases import CASES  # noqa: E402
from fidelity_launch import Launches, Process  # noqa: E402

from tests.launching import start  # noqa: E402

pytestmark = pytest.mark.gloo

# The first case of each launch waits for all of it, and may have to wait for the plain process before.
QUICK_LIMIT_S, SLOW_LIMIT_S = 900, 14400


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Launches]:
    """Of quick and of slow cases: a launch runs those that were selected for this session."""
    sizes: dict[str, set[int]] = {"contrastive": {2}}
    for item in request.session.items:
        if item.path == Path(__file__) and (call := getattr(item, "callspec", None)):
            sizes.setdefault(call.params["name"], set()).add(call.params["size"])
    chosen = [replace(CASES[name], ranks=tuple(sorted(wanted))) for name, wanted in sizes.items()]
    kinds = {False: "quick", True: "slow"}
    return {
        slow: Launches(
            tmp_path_factory.mktemp(name), [c for c in chosen if c.slow is slow and not c.pending], start=_start
        )
        for slow, name in kinds.items()
    }


def _start(rank: int, command: Sequence[str], env: Mapping[str, str], output: Path) -> Process:
    output.write_bytes(b"")
    return start(rank, command, env, stdout=output, stderr=output, fresh=False)


def _parameters() -> list[object]:
    found = []
    for size in (2, 3, 4):
        for case in CASES.values():
            # The command runs each case on all of its numbers of ranks; here one is enough, the largest.
            if size in (case.ranks if case.slow else case.ranks[-1:]):
                marks = [pytest.mark.timeout(SLOW_LIMIT_S if case.slow else QUICK_LIMIT_S)]
                marks += [pytest.mark.slow] if case.slow else []
                marks += [pytest.mark.skip(reason=f"pending: {case.pending}")] if case.pending else []
                found.append(pytest.param(case.name, size, id=f"{size} ranks: {case.name}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "size"), _parameters())
def test_the_pipeline_computes_what_one_process_computes(launches: dict[bool, Launches], name: str, size: int) -> None:
    row = judged(launches[CASES[name].slow], CASES[name], size)
    problems = row.comparison.problems if row.comparison else [row.verdict]
    log = launches[CASES[name].slow].folder / str(size) / f"{name}.log"
    assert not problems, "\n".join([*problems, log.read_text()[-6000:] if log.exists() else ""])


def test_a_loss_that_does_not_separate_is_warned_about_once(launches: dict[bool, Launches]) -> None:
    launches[False].records(CASES["contrastive"], 2)
    source, first = inspect.getsourcelines(CASES["contrastive"].body)
    number = first + next(n for n, line in enumerate(source) if "F.cross_entropy" in line)
    where = f"{Path(inspect.getfile(CASES['contrastive'].body)).name}:{number})"
    lines = [line for line in launches[False].logs[2, "no"].splitlines() if "does not separate" in line]
    # The launch runs other cases too: each is warned about at its own line.
    assert sum("mm.default" in line and where in line for line in lines) == 1, (where, lines)
