"""One process of `gpu.py`: a plain Accelerate loop over a small member of the zoo, which prints its losses.

Models: what a training script does, in 32 bits without TF32, so that one process and two must agree. Several processes
talk over gloo, whatever device they compute on. Ignores: data sets.
"""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from pfeife_accelerate.zoo import member

ROWS = 16


def main(name: str, steps: int, size: int) -> None:
    """Train a little."""
    torch.backends.cudnn.allow_tf32 = False
    over_gloo = [InitProcessGroupKwargs(backend="gloo")] if size > 1 else None
    accelerator = Accelerator(kwargs_handlers=over_gloo)
    model = member(name)
    module = model.build("random", seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    module, optimizer = accelerator.prepare(module, optimizer)
    losses = []
    for step in range(steps):
        batch = model.batch(ROWS, seed=step % 2).to(accelerator.device)
        loss = model.loss(module(**batch.inputs), batch.targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"losses {json.dumps(losses)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
