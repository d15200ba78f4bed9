"""Train models with graph breaks, and models that cannot be captured, and write what each of them recorded.

    breaks_run.py FOLDER SCENARIO...

The same script is run as one plain process and as ranks of a pipeline. Results are `FOLDER/SCENARIO.RANK.pt`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

WIDTH = 16
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A residual block that calls something in its middle."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        return x + self.outer(self.between(hidden))


class Net(nn.Module):
    """Blocks on sequences, with a loss inside if it is given labels, and a weight used at both ends if tied."""

    def __init__(self, *between: Callable[[torch.Tensor], torch.Tensor], tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(function) for function in between)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        skip = y = self.first(x)
        for block in self.blocks:
            y = block(y)
        y = self.last(y) + skip
        if labels is None:
            return y
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-100), y


def same(h: torch.Tensor) -> torch.Tensor:
    return h


def broken(h: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return h * 2


def prints(h: torch.Tensor) -> torch.Tensor:
    print("in the model")
    return h


def logs(h: torch.Tensor) -> torch.Tensor:
    logging.getLogger("model").info("in the model")
    return h + 1


@torch._dynamo.disable
def skipped(h: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(h) * 3


def keeps_rows(h: torch.Tensor) -> torch.Tensor:
    rows, length = h.shape[0], h.shape[1]
    torch._dynamo.graph_break()
    return h.view(rows * length, -1).view(rows, length, -1)


def branches(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        return h * 2
    return h


def reads(h: torch.Tensor) -> torch.Tensor:
    return h * (1 + h.detach().abs().mean().item())


def picks(h: torch.Tensor) -> torch.Tensor:
    kept = h.flatten(0, 1)[(h.sum(-1) > 0).flatten()]
    return h + kept.mean(0)


class Recurrent(nn.Module):
    """Recurrent layers, dropout, and a count of its calls."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y, _ = self.layers(F.dropout(self.first(x), 0.2, self.training))
        return self.last(self.norm(y.transpose(1, 2)).transpose(1, 2)) / self.calls

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(-1)


def outside(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def inside(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(x, labels=labels)[0]


SCENARIOS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "graph break": (lambda: Net(same, broken, same), outside),
    "print and logger": (lambda: Net(prints, logs, same), outside),
    "skipped helper": (lambda: Net(same, skipped, same), outside),
    "many pieces": (lambda: Net(broken, prints, skipped, broken, same), outside),
    "tied": (lambda: Net(broken, same, broken, tied=True), outside),
    "loss inside": (lambda: Net(broken, same, broken), inside),
    "rows in Python": (lambda: Net(same, keeps_rows, same), outside),
    "branch": (lambda: Net(same, branches, same), outside),
    "item": (lambda: Net(same, reads, same), inside),
    "picked rows": (lambda: Net(same, picks, same), outside),
    "lstm": (lambda: Recurrent(nn.LSTM), outside),
    "gru": (lambda: Recurrent(nn.GRU), outside),
}


def batches(steps: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two lengths, and short batches."""
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        rows, length = (8, 8, 5, 8, 3, 6)[step % 6], (6, 6, 6, 9, 9, 7)[step % 6]
        labels = torch.randint(0, WIDTH, (rows, length), generator=generator)
        labels[torch.rand(rows, length, generator=generator) < 0.3] = -100
        yield torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64), labels


def run(accelerator: Accelerator, name: str) -> dict[str, Any]:
    """Train one model in twos of accumulated batches, evaluate it, and note all that can be read."""
    make, loss_of = SCENARIOS[name]
    set_seed(1)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    records: dict[str, Any] = {"losses": [], "norms": []}
    for step, (x, labels) in enumerate(batches()):
        with accelerator.accumulate(model):
            loss = loss_of(model, x, labels)
            accelerator.backward(loss)
            if step == 0:
                records["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            if accelerator.sync_gradients:
                records["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        records["losses"].append(loss.item())
    model.eval()
    with torch.no_grad():
        records["evaluation"] = [loss_of(model, x, labels).item() for x, labels in batches(2)]
    if isinstance(model, Recurrent):
        records["generated"] = accelerator.unwrap_model(model).generate(next(batches())[0])
    records["state"] = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    records["is pipelined"] = any(p.is_meta for p in model.parameters())
    records["drawn"] = torch.rand(3)
    return records


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    for name in names:
        torch.save(run(accelerator, name), folder / f"{name}.{os.environ.get('RANK', 'plain')}.pt")
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
