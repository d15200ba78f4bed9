"""Every error id and every warning of the package is looked for by some test.

Ignores: whether that test provokes the message; this one only sees that it names it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pfeife_accelerate"
ID = re.compile(r"PF\d{3}")
#: Functions and methods that say something to people: all loggers' levels from warnings on, and what writes lines.
SPEAKERS = ("warn_once", "warning", "warn", "error", "exception", "critical", "_say")
#: Where the speakers are defined.
NOT_SPEAKING = ("log.py",)


@dataclass(frozen=True)
class Said:
    """A warning: a distinctive piece of the call that gives it, and the test file that has `text` (else the piece)."""

    file: str
    piece: str
    test: str
    text: str | None = None


WARNINGS = (
    Said("_autoload.py", "could not be loaded and does nothing", "local/test_seams.py"),
    Said("_autoload.py", "is not in force", "local/test_seams.py"),
    Said("capture/model_capture.py", "has been captured in more than", "local/test_stitch.py"),
    Said("cost/store.py", "cannot be read and is written anew", "local/test_store.py"),
    Said("cost/store.py", "cannot be kept for the next run", "local/test_store.py"),
    Said(
        "integration/process_view.py",
        "a pipeline is configured but this script runs in a single process",
        "gloo/test_process_view.py",
    ),
    Said("runtime/failure.py", "{self._name} failed, stopping all ranks'", "gloo/test_failure.py",
         "[pfeife rank 1/3] failed, stopping all ranks\\n"),
    Said("runtime/failure.py", "{self._name} failed, stopping all ranks: ", "gloo/test_failure.py",
         "failed, stopping all ranks: {text}"),
    Said("runtime/failure.py", "({where}), stopping all ranks", "gloo/test_failures.py", "exited with code 3 ("),
    Said("runtime/failure.py", "stopped because rank", "gloo/test_failures.py"),
    Said("session/caveats.py", "the batch is not divided into micro-batches", "gloo/test_caveats.py"),
    Said("session/caveats.py", "BatchNorm in training mode normalises each micro-batch", "gloo/test_caveats.py"),
    Said("session/caveats.py", "the forward pass changes buffers (", "gloo/test_caveats.py"),
    Said("session/copies.py", "are no longer the same", "gloo/test_breaks.py"),
    Said("session/loss_choice.py", "differs from the whole batch's", "gloo/test_trial.py"),
    Said("session/loss_choice.py", "the loss does not separate over micro-batches", "local/test_loss_choice.py"),
    Said("session/optimizer_state.py", "is taken to treat each parameter by itself", "gloo/test_optimizers.py"),
    Said("session/programs.py", "compiled stages compute the gradients of weights", "local/test_compiled.py"),
    Said("session/tracing.py", "no step was recorded into", "gloo/test_options.py"),
    Said("session/tracing.py", "the trace cannot be kept in", "local/test_tracing.py"),
    Said("session/unpipelined.py", ", doubt)", "gloo/test_messages_of_runs.py",
         "it is assumed that dimension 0 of 'x' (size 8) is the batch"),
    Said("session/unpipelined.py", "an evaluation is run on the whole model", "gloo/test_breaks.py"),
    Said("session/unpipelined.py", "is not pipelined: every process of a pipeline trains", "gloo/test_breaks.py"),
)  # fmt: skip


def _package_files() -> list[Path]:
    """All that an installed package has: `zoo` is a folder of its own in the repository."""
    return [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "zoo").glob("*.py"))]


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


@functools.lru_cache
def _calls() -> tuple[tuple[str, ast.Call], ...]:
    """(file, call) of the whole package."""
    return tuple(
        (_name(path), node)
        for path in _package_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
        if isinstance(node, ast.Call)
    )


def _ids_raised() -> set[str]:
    return {
        keyword.value.value
        for _, call in _calls()
        for keyword in call.keywords
        if keyword.arg == "id" and isinstance(keyword.value, ast.Constant) and ID.fullmatch(str(keyword.value.value))
    }


def _ids_in(text: str) -> set[str]:
    return set(ID.findall(text))


def _warnings() -> Iterator[tuple[str, int, str]]:
    """(file, line, call) of everything said."""
    for file, call in _calls():
        if file not in NOT_SPEAKING and ast.unparse(call.func).split(".")[-1] in SPEAKERS:
            yield file, call.lineno, ast.unparse(call)


def test_every_error_id_is_named_in_a_test():
    folders = (ROOT / "tests", ROOT / "zoo" / "benchmarks")
    files = [path for folder in folders for path in folder.rglob("*.py") if path != Path(__file__).resolve()]
    tested = set().union(*(_ids_in(path.read_text(encoding="utf-8")) for path in files))
    missing = sorted(_ids_raised() - tested)
    assert not missing, missing


def test_every_error_id_that_the_package_speaks_of_is_raised_somewhere():
    spoken_of = set().union(*(_ids_in(path.read_text(encoding="utf-8")) for path in _package_files()))
    unknown = sorted(spoken_of - _ids_raised())
    assert not unknown, unknown


def test_every_warning_is_in_the_table():
    unknown = [
        f"{file}:{line}: {text}"
        for file, line, text in _warnings()
        if sum(row.file == file and row.piece in text for row in WARNINGS) != 1
    ]
    assert not unknown, "\n".join(unknown)


def test_the_table_of_warnings_is_true():
    found = list(_warnings())
    for row in WARNINGS:
        assert sum(row.file == file and row.piece in text for file, _, text in found) == 1, row
        assert (row.text or row.piece) in (ROOT / "tests" / row.test).read_text(encoding="utf-8"), row
