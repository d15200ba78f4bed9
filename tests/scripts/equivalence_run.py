"""Run cases in this process, one after the other, and write what each of them recorded.

    equivalence_run.py FOLDER CASE...

The same script is run as one plain process and as ranks of a pipeline. It knows which only to vary the pipeline's
options from case to case, which a real script does by its configuration. Results are `FOLDER/CASE.RANK.pt`.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from equivalence_cases import CASES
from equivalence_kit import Case, Models, Run


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    accelerator, models = Accelerator(), Models()
    for name in names:
        case = CASES[name]
        start_s = time.monotonic()
        accelerator.gradient_accumulation_steps = 1
        set_options(case, size)
        models.options = case.options
        set_seed(1)
        run = Run(accelerator=accelerator, dtype=case.dtype, rank=rank, size=size, models=models)
        case.body(run)
        torch.save(run.records, folder / f"{name}.{rank}.pt")
        accelerator.wait_for_everyone()
        if rank == 0:
            print(f"{name}: {time.monotonic() - start_s:.1f} s", flush=True)


def set_options(case: Case, size: int) -> None:
    """Give the running pipeline the case's options, for the models that are prepared from now on."""
    if size == 1:
        return
    from pfeife_accelerate import session

    running: Any = session.current()
    assert running is not None
    running.plugin = replace(type(running.plugin)(), **case.options)


if __name__ == "__main__":
    main()
