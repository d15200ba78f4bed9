"""What the cases are made of: a run of a case in one process, a model in training, and the registry of cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from equivalence_models import Batch, Kit, build

Options = dict[str, Any]
GPIPE: Options = {"schedule": "gpipe"}
ONE_F_ONE_B: Options = {"schedule": "1f1b"}


def looped(microbatches_per_loop: int) -> Options:
    """The looped order with two stages a rank and a prefetched forward."""
    return {
        "schedule": "looped",
        "num_loops": 2,
        "microbatches_per_loop": microbatches_per_loop,
        "prefetch_forwards": 1,
    }


class Models:
    """Prepared models. Cases with equal options share one, to spare the capture, and start from equal parameters."""

    def __init__(self) -> None:
        self.options: Options = {}
        self._made: dict[Any, tuple[Kit, list[torch.Tensor]]] = {}

    def get(self, accelerator: Accelerator, name: str, dtype: torch.dtype) -> Kit:
        """The prepared model of that name, as it was when it was built."""
        order = {option: value for option, value in self.options.items() if option != "num_microbatches"}
        key = (name, dtype, *sorted(order.items()))
        if key not in self._made:
            kit = build(name, dtype)
            accelerator.prepare(kit.model)
            self._made[key] = (kit, [parameter.detach().clone() for parameter in kit.model.parameters()])
        kit, first = self._made[key]
        with torch.no_grad():
            for parameter, value in zip(kit.model.parameters(), first, strict=True):
                parameter.grad = None
                if not parameter.is_meta:
                    parameter.copy_(value)
        return kit


@dataclass
class Run:
    """One run of a case in one process."""

    accelerator: Accelerator
    dtype: torch.dtype
    rank: int
    size: int
    models: Models
    records: dict[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float64

    def record(self, name: str, value: Any) -> None:
        """Note a value that must be the same in every process that notes it; reads it now."""
        value = torch.from_numpy(value.detach().numpy().copy()) if isinstance(value, torch.Tensor) else value
        self.records.setdefault(name, []).append(value)

    def prepare(self, name: str, *, optimizer: str | None = None, rate: float = 1e-2) -> Training:
        """The model of that name and an optimizer, prepared."""
        kit = self.models.get(self.accelerator, name, self.dtype)
        parameters = kit.model.parameters()
        # Adam divides by gradients' sizes and so amplifies what reordered sums differ by; float64 is to show exactness.
        if optimizer == "adamw" or (optimizer is None and not self.exact):
            made: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        else:
            made = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        return Training(self, kit, kit.model, self.accelerator.prepare(made))


class Training:
    """A prepared model and its optimizer, with the lines that most scripts share."""

    def __init__(self, run: Run, kit: Kit, model: Any, optimizer: Any) -> None:
        self.run = run
        self.kit = kit
        self.model = model
        self.optimizer = optimizer
        self.generator = torch.Generator().manual_seed(7)
        self.step_number = 0

    def batch(self, rows: int = 8, length: int = 12) -> Batch:
        return self.kit.batch(self.generator, rows, length)

    def forward(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        return self.kit.run(self.model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        self.run.accelerator.backward(loss)
        if self.step_number == 0:
            self.record_gradients()

    def record_gradients(self) -> None:
        """Each rank records those of its own parameters."""
        own = {n: p for n, p in self.model.named_parameters() if not p.is_meta}
        found = {n: p.grad.detach().clone() for n, p in own.items() if p.grad is not None}
        self.run.record("gradients", found)

    def update(self, loss: Any = None) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        if loss is not None:
            self.run.record("loss", loss.item())

    def step(self, batch: Batch) -> None:
        _, loss = self.forward(batch)
        self.backward(loss)
        self.update(loss)

    def evaluate(self, rows: int = 8, length: int = 12) -> None:
        self.model.eval()
        with torch.no_grad():
            outputs, loss = self.forward(self.kit.batch(torch.Generator().manual_seed(3), rows, length))
        self.run.record("evaluation loss", loss)
        self.run.record("evaluation", outputs.logits if hasattr(outputs, "logits") else outputs)
        self.model.train()


Body = Callable[[Run], None]


@dataclass(frozen=True)
class Case:
    """A case by name. Cases with an equal `plain` do the same in a plain process, which is run once for all of them."""

    name: str
    plain: str
    body: Body
    ranks: tuple[int, ...]
    options: Options
    dtype: torch.dtype = torch.float32
    slow: bool = False


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    assert case.name not in CASES, case.name
    CASES[case.name] = case


def case(
    *, ranks: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float64, microbatches: int | None = 4, **options: Any
) -> Callable[[Body], Body]:
    """Register a function as a case under its own name."""
    if microbatches is not None:
        options["num_microbatches"] = microbatches

    def register(body: Body) -> Body:
        add(Case(body.__name__, body.__name__, body, ranks, {"schedule": "1f1b", **options}, dtype))
        return body

    return register


def token_loss(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)
