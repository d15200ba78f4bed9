"""The promise of exactness: what a script computes in one plain process it computes as a pipeline, step by step.

The oracle is the same script as one plain process, without the plug-in. Many cases run in one launch, because starting
processes costs more than the cases; each is reported by its name. What they do is in `tests/scripts/equivalence_*.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import Result, run_command, run_ranks

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from equivalence_cases import CASES  # noqa: E402

pytestmark = pytest.mark.gloo

LAUNCH_LIMIT_S = 540
SLOW_LAUNCH_LIMIT_S = 5400


@dataclass(frozen=True)
class Tolerance:
    """Relative errors allowed for values and for gradients."""

    values: float
    gradients: float


TOLERANCES = {torch.float32: Tolerance(1e-6, 1e-5), torch.float64: Tolerance(1e-12, 1e-10)}
# A gradient that is zero in exact arithmetic has no relative error: it is compared with this part of the largest one.
SMALLEST_NORM = 1e-4


# The first case of each launch waits for all of it, and may have to wait for the plain process before.
QUICK_MARKS = [pytest.mark.timeout(2 * LAUNCH_LIMIT_S + 60)]


class Launches:
    """Results of all cases of one kind (slow or not): one plain launch, and one for each number of ranks."""

    def __init__(self, folder: Path, *, slow: bool) -> None:
        self.folder = folder
        self.slow = slow
        self.results: dict[int, Result] = {}

    def names(self, size: int) -> list[str]:
        """Cases that a launch of that many processes runs; cases that share a model next to each other."""
        return [c.name for c in CASES.values() if c.slow == self.slow and size in c.ranks]

    def records(self, name: str, size: int) -> list[dict[str, Any]]:
        """What each rank recorded."""
        result = self._run(size, self.names(size))
        files = [self.folder / str(size) / f"{name}.{rank}.pt" for rank in range(size)]
        if not all(file.exists() for file in files):
            pytest.fail(f"no result of {name} on {size} ranks: the launch {result.report()[-6000:]}")
        return [torch.load(file, weights_only=True) for file in files]

    def plain(self, name: str) -> dict[str, Any]:
        """What one process without the plug-in recorded."""
        names = {c.plain: c.name for c in CASES.values() if c.slow == self.slow}
        result = self._run(1, list(names.values()))
        file = self.folder / "1" / f"{names[CASES[name].plain]}.0.pt"
        assert file.exists(), result.report()
        records: dict[str, Any] = torch.load(file, weights_only=True)
        return records

    def _run(self, size: int, names: list[str]) -> Result:
        if size not in self.results:
            folder = self.folder / str(size)
            folder.mkdir()
            limit_s = SLOW_LAUNCH_LIMIT_S if self.slow else LAUNCH_LIMIT_S
            script, args = SCRIPTS / "equivalence_run.py", [str(folder), *names]
            if size == 1:
                plain = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
                self.results[1] = run_command([sys.executable, str(script), *args], env=plain, timeout=limit_s)
            else:
                pipelined = {"PFEIFE_ENABLED": "true", "ACCELERATE_USE_CPU": "true"}
                self.results[size] = run_ranks(script, num_processes=size, args=args, env=pipelined, timeout=limit_s)
        return self.results[size]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Launches]:
    kinds = {False: "quick", True: "slow"}
    return {slow: Launches(tmp_path_factory.mktemp(name), slow=slow) for slow, name in kinds.items()}


def _parameters() -> list[Any]:
    return [
        pytest.param(
            case.name,
            size,
            id=f"{size} ranks: {case.name}",
            marks=[pytest.mark.slow, pytest.mark.timeout(2 * SLOW_LAUNCH_LIMIT_S)] if case.slow else QUICK_MARKS,
        )
        for size in (2, 3, 4)
        for case in CASES.values()
        if size in case.ranks
    ]


@pytest.mark.parametrize(("name", "size"), _parameters())
def test_the_pipeline_computes_what_one_process_computes(launches: dict[bool, Launches], name: str, size: int) -> None:
    launch = launches[CASES[name].slow]
    problems = differences(launch.plain(name), launch.records(name, size), TOLERANCES[CASES[name].dtype])
    assert not problems, "\n".join(problems)


def test_a_loss_that_does_not_separate_is_warned_about_once(launches: dict[bool, Launches]) -> None:
    launches[False].records("contrastive", 2)
    lines = [line for line in launches[False].results[2].stderr.splitlines() if "does not separate" in line]
    assert sum("mm.default" in line for line in lines) == 1, lines


def differences(plain: dict[str, Any], ranks: list[dict[str, Any]], tolerance: Tolerance) -> list[str]:
    """What is not equal, in words."""
    problems = []
    for key, expected in plain.items():
        found = [records[key] for records in ranks if key in records]
        if not found:
            problems.append(f"{key}: no rank recorded it")
        if key == "gradients":
            problems += _gradient_differences(expected, found, tolerance.gradients)
            continue
        if found and max(map(len, found)) < len(expected) and sum(map(len, found)) != len(expected):
            problems.append(f"{key}: not all {len(expected)} values were recorded by some rank")
        for rank, values in enumerate(found):
            if len(values) == len(expected):
                problems += _value_differences(f"{key} on rank {rank}", values, expected, tolerance.values)
            else:
                problems += _subsequence_difference(key, values, expected, tolerance.values)
    return problems


def _value_differences(where: str, values: list[Any], expected: list[Any], allowed: float) -> list[str]:
    pairs = enumerate(zip(values, expected, strict=True))
    return [f"{where}, record {i}: {a!r} instead of {b!r}" for i, (a, b) in pairs if not _close(a, b, allowed)]


def _subsequence_difference(key: str, values: list[Any], expected: list[Any], allowed: float) -> list[str]:
    """A rank that recorded some of the values only must have the right ones in the right order."""
    remaining = iter(expected)
    for value in values:
        if not any(_close(value, candidate, allowed) for candidate in remaining):
            return [f"{key}: {value!r} is not what one process read"]
    return []


def _close(value: Any, expected: Any, allowed: float) -> bool:
    if isinstance(expected, torch.Tensor):
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return False
        if not expected.is_floating_point():
            return bool(torch.equal(value, expected))
        # Elements near zero are sums that cancel: a tensor's error is measured against its size.
        return bool((value - expected).norm() <= 10 * allowed * expected.norm())
    if isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(_close(a, b, allowed) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, float):
        return value == pytest.approx(expected, rel=allowed, abs=0, nan_ok=True)
    return bool(value == expected)


def _gradient_differences(expected: list[Any], ranks: list[list[Any]], allowed: float) -> list[str]:
    problems = []
    for i, whole in enumerate(expected):
        largest = max(float(g.norm()) for g in whole.values())
        missing = set(whole)
        for rank, records in enumerate(ranks):
            for name, gradient in records[i].items():
                missing.discard(name)
                if name not in whole:
                    problems.append(f"gradient {name} on rank {rank}: there is none in one process")
                    continue
                norm = max(float(whole[name].norm()), SMALLEST_NORM * largest)
                error = float((gradient - whole[name]).norm()) / norm
                if not error <= allowed:
                    problems.append(f"record {i}, gradient {name} on rank {rank}: relative error {error:.2g}")
        if missing:
            problems.append(f"record {i}: no rank has a gradient of {sorted(missing)}")
    return problems


if __name__ == "__main__":
    # For debugging: compare a folder of results made by hand (FOLDER/1, FOLDER/2 ...).
    folder = Path(sys.argv[1])
    for result_file in sorted(folder.glob("[234]/*.0.pt")):
        case_name, count = result_file.name.removesuffix(".0.pt"), int(result_file.parent.name)
        same = [c.name for c in CASES.values() if c.plain == CASES[case_name].plain]
        reference = next(f for n in same if (f := folder / "1" / f"{n}.0.pt").exists())
        by_rank = [torch.load(result_file.parent / f"{case_name}.{r}.pt") for r in range(count)]
        found_differences = differences(torch.load(reference), by_rank, TOLERANCES[CASES[case_name].dtype])
        print(count, case_name, "ok" if not found_differences else os.linesep.join(["FAILED", *found_differences[:4]]))
