"""Random numbers and gradient checkpointing across processes: neither depends on the ranks or the schedule."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "randomness_run.py"


def _run(folder: Path, ranks: int, *names: str, **options: str) -> dict[str, Any]:
    env = {"PFEIFE_ENABLED": "true", "PFEIFE_NUM_MICROBATCHES": "4", "ACCELERATE_USE_CPU": "true"}
    env |= {f"PFEIFE_{name.upper()}": value for name, value in options.items()}
    result = run_ranks(SCRIPT, num_processes=ranks, args=(str(folder), *names), env=env, timeout=360).check()
    lines = [line.partition(": ") for line in result.stdout.splitlines() if ": " in line]
    return {name: json.loads(text) for name, _, text in lines if name in names}


def test_masks_are_the_same_for_any_number_of_ranks_and_any_schedule_and_repeat_where_they_must(tmp_path: Path):
    first = _run(tmp_path, 2, "losses", "unequal", "repeats", "save", "again", "alone", schedule="1f1b")
    assert len(first) == 6
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    drawn = [draw() for _ in range(3) for draw in (lambda: torch.rand(1).item(), np.random.rand, random.random)]
    assert first["losses"]["drawn"] == pytest.approx(drawn, abs=0), "the script draws as without a model"
    others = [
        _run(tmp_path, 1, "losses", "repeats", "load", "again"),
        _run(tmp_path, 3, "losses", "repeats", "load", schedule="looped", num_loops="2"),
        _run(tmp_path, 2, "losses", schedule="gpipe"),
    ]
    for found in others:
        assert found["losses"]["losses"] == pytest.approx(first["losses"]["losses"], rel=1e-6)
        assert found["losses"]["drawn"] == first["losses"]["drawn"]
    for found in others[:2]:
        assert found["load"] == pytest.approx(first["save"], rel=1e-9), "a resumed run has the masks of the one saved"
        assert found["repeats"] == pytest.approx(first["repeats"], rel=1e-6)
    assert len(set(first["losses"]["losses"])) == 6


def test_checkpointing_of_libraries_gives_the_gradient_of_one_process(tmp_path: Path):
    found = _run(tmp_path, 2, "llama", "unet", "vit")
    assert found == {"llama": ["equal", "equal"], "unet": "equal", "vit": "equal"}
