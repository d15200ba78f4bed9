"""Run cases in this process, one after the other, and write what each of them recorded.

    fidelity_worker.py FOLDER LAUNCH LIMIT_S CASE...

The same file is run as one plain process and as ranks of a pipeline. It knows which only to vary the pipeline's options
from case to case, which a real script does by its configuration, and to note in which order the steps ran. Results are
`FOLDER/CASE.RANK.pt`. A case that fails or takes too long ends the process; the launcher goes on with the rest.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from fidelity_cases import CASES
from fidelity_kit import Case, Models, Run
from fidelity_plans import turned


def main() -> None:
    """Run the cases of the command line."""
    folder, limit_s, names = Path(sys.argv[1]), float(sys.argv[3]), sys.argv[4:]
    precision = sys.argv[2].split("+")[0]
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    accelerator, models = accelerator_of(precision), Models()
    orders = Orders(size)
    for name in names:
        case = CASES[name]
        faulthandler.dump_traceback_later(limit_s, exit=True)
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        accelerator.gradient_accumulation_steps = 1
        orders.set_options(case)
        models.options, models.plan = case.options, case.plan
        set_seed(1)
        run = Run(accelerator=accelerator, dtype=case.dtype, rank=rank, size=size, models=models)
        (case.reference or case.body if size == 1 else case.body)(run)
        torch.save({**run.records, "order": orders.take()}, folder / f"{name}.{rank}.pt")
        accelerator.wait_for_everyone()
        if rank == 0:
            wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
            print(f"{name}: {wall_s:.1f} s, {cpu_s:.1f} s of this process", flush=True)
    faulthandler.cancel_dump_traceback_later()


def accelerator_of(precision: str) -> Accelerator:
    """An accelerator in that precision. It refuses fp16 on CPUs, where autocast and scaler work nevertheless."""
    if precision != "fp16":
        return Accelerator(mixed_precision=precision)
    accelerator = Accelerator()
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return accelerator


class Orders:
    """The running pipeline, as this worker sees it: options are set for a case, and announced schedules noted."""

    def __init__(self, size: int) -> None:
        self._running: Any = None
        self._kinds: set[str] = set()
        self._plan = ""
        if size > 1:
            from pfeife_accelerate import session

            self._running = session.current()
            assert self._running is not None
            conductor = self._running.conductor
            announce = conductor.announce

            def noted(announcement: Any) -> None:
                self._kinds.add(announcement.run.value)
                announce(announcement)

            conductor.announce = noted
            follow = self._running.follow_plan
            self._running.follow_plan = lambda plan: follow(turned(self._plan, plan) if self._plan else plan)

    def set_options(self, case: Case) -> None:
        """Give the running pipeline the case's options, for the models that are prepared from now on."""
        if self._running is not None:
            self._running.plugin = replace(type(self._running.plugin)(), **case.options)
            self._plan = case.plan

    def take(self) -> list[str]:
        """Kinds of schedules that this rank has announced since the last time; only one rank announces."""
        kinds = sorted(self._kinds)
        self._kinds.clear()
        return kinds


if __name__ == "__main__":
    main()
