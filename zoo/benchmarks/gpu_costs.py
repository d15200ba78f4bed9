"""One model of `gpu.py`: its operations measured in each precision, the cost files, and one printed line for each.

Models: every distinct operation once, by the package's profiler, the longest first; what is left when the time is up is
modelled, calibrated by what was measured. Ignores: operations that run at the same time.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pfeife_accelerate.cost.hardware import device_spec, link_spec
from pfeife_accelerate.cost.op_profile import OpProfile, measure
from pfeife_accelerate.cost.roofline import flops
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostTable, Machine, write_cost_file
from pfeife_accelerate.tools.models import ModelledModel, ModelOptions, resolve

__all__ = ["Costs", "Left"]

#: In the order in which they are measured, should the time not suffice for all.
PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"vit-g14": 24, "llama2-7b": 1, "sdxl-unet": 1}
TINY_ROWS = 4
LEAST_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A micro-batch of one model in one precision."""

    model: str
    precision: str
    rows: int
    forward_s: float
    backward_s: float
    kept_bytes: int
    forward_flops: float
    kinds_measured: int
    kinds: int
    capture_s: float
    file: str

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Headings of `cells`."""
        return (
            "model", "precision", "rows", "forward ms", "backward ms", "TFLOP/s", "kept MB", "measured", "capture s",
            "cost file",
        )  # fmt: skip

    def cells(self) -> tuple[str, ...]:
        """A row of the table; the rate is that of forward and backward, which computes twice as much."""
        rate = 3 * self.forward_flops / (self.forward_s + self.backward_s) / 1e12
        return (
            self.model,
            self.precision,
            str(self.rows),
            f"{self.forward_s * 1e3:.2f}",
            f"{self.backward_s * 1e3:.2f}",
            f"{rate:.3g}",
            f"{self.kept_bytes / 1e6:.0f}",
            f"{self.kinds_measured} of {self.kinds} kinds",
            f"{self.capture_s:.0f}",
            self.file,
        )


@dataclass(frozen=True, kw_only=True)
class Left:
    """What was not measured, and why."""

    model: str
    precision: str
    why: str


def costs(name: str, precision: str, device: torch.device, seconds: float, out: Path) -> Costs:
    """Capture, measure, write."""
    start_s = time.monotonic()
    model = ModelledModel(resolve(name, ModelOptions(dtype=PRECISIONS[precision])))
    capture_s = time.monotonic() - start_s
    spec = device_spec(device)
    rows = ROWS.get(name, TINY_ROWS)
    profiles: dict[str, OpProfile] = {}
    work, kinds = 0.0, 0

    def measured(ops: object) -> CostTable:
        nonlocal work, kinds
        listed = list(ops)  # type: ignore[call-overload]
        known = [op for op in listed if op is not None]
        work, kinds = sum(map(flops, known)), len({op.key for op in known})
        found = measure(listed, device, budget_s=max(LEAST_S, seconds - capture_s), profiles=profiles)
        return CostTable(ops=found)

    graph = model.cost_graph(rows, spec, device=device, measured=measured)
    path = out / f"{name}-{precision}-{rows}.json.gz"
    write_cost_file(path, graph, Machine(devices=(spec,), link=link_spec("nccl" if device.type == "cuda" else "gloo")))
    forward_s = sum(node.forward_s for node in graph.nodes)
    return Costs(
        model=name,
        precision=precision,
        rows=rows,
        forward_s=forward_s,
        backward_s=graph.work_s - forward_s,
        kept_bytes=sum(node.saved_bytes for node in graph.nodes),
        forward_flops=work,
        kinds_measured=len(profiles),
        kinds=kinds,
        capture_s=capture_s,
        file=path.name,
    )


def main() -> None:
    """Each precision, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    end_s = time.monotonic() + options.seconds
    slowest_s = 0.0
    for number, precision in enumerate(PRECISIONS):
        start_s = time.monotonic()
        left_s = end_s - start_s
        try:
            if number and left_s < slowest_s + LEAST_S:
                raise TimeoutError("its time was up")
            found = costs(
                options.model, precision, torch.device(options.device), left_s / (len(PRECISIONS) - number), options.out
            )
            slowest_s = max(slowest_s, found.capture_s)
            print(f"costs {json.dumps(asdict(found))}", flush=True)
        except (PfeifeError, RuntimeError, TimeoutError) as problem:
            why = problem.what if isinstance(problem, PfeifeError) else str(problem)
            print(f"left {json.dumps(asdict(Left(model=options.model, precision=precision, why=why)))}", flush=True)


if __name__ == "__main__":
    main()
