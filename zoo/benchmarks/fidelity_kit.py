"""What the cases are made of: a run of a case in one process, a model in training, and the registry of cases.

Models: a case is the body of a plain script. It runs once in a plain process and once as a pipeline, and what it
records in both is compared. Ignores: how processes are started (`fidelity_launch`) and compared (`fidelity_compare`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from fidelity_models import Batch, Kit, build
from torch import nn

Options = dict[str, Any]
Body = Callable[["Run"], None]
GPIPE: Options = {"schedule": "gpipe"}
ONE_F_ONE_B: Options = {"schedule": "1f1b"}
LOOPED: Options = {"schedule": "looped", "num_loops": 2, "microbatches_per_loop": 2, "prefetch_forwards": 1}


class Models:
    """Prepared models. Cases with equal options share one, to spare the capture, and start from equal parameters."""

    def __init__(self) -> None:
        self.options: Options = {}
        self.plan = ""
        self._made: dict[Any, tuple[Kit, list[torch.Tensor]]] = {}

    def get(self, accelerator: Accelerator, name: str, dtype: torch.dtype) -> Kit:
        """The prepared model of that name, as it was when it was built."""
        order = {option: value for option, value in self.options.items() if option != "num_microbatches"}
        key = (name, dtype, self.plan, *sorted(order.items()))
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
        """Whether this process logs and saves; in a plain process, yes."""
        return bool(self.accelerator.is_main_process)

    @property
    def is_last(self) -> bool:
        """Whether this process has the model's last stage; in a plain process, yes."""
        return self.rank == self.size - 1

    @property
    def exact(self) -> bool:
        """Whether the case is about exactness and not about rounding."""
        return self.dtype == torch.float64

    def record(self, name: str, value: Any) -> None:
        """Note a value that must be the same in every process that notes it; reads it now."""
        if isinstance(value, torch.Tensor):
            whole = value.detach()
            value = torch.from_numpy((whole.float() if whole.dtype == torch.bfloat16 else whole).numpy().copy())
        self.records.setdefault(name, []).append(value)

    def record_gradients(self, model: nn.Module, label: str = "") -> None:
        """Note the gradients that this process has; a process of a pipeline has those of its own stages."""
        own = {n: p for n, p in model.named_parameters() if not p.is_meta}
        found = {n: p.grad.detach().clone() for n, p in own.items() if p.grad is not None}
        self.records.setdefault(f"gradients {label}".strip(), []).append(found)

    def record_weights(self, model: nn.Module, label: str = "") -> None:
        """Note the parameters that this process has."""
        found = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta}
        self.records.setdefault(f"weights {label}".strip(), []).append(found)

    def prepare(self, name: str, *, optimizer: str | None = None, rate: float = 1e-2) -> Training:
        """The model of that name and an optimizer, prepared. Cases share the model: they must not change it."""
        kit = self.models.get(self.accelerator, name, self.dtype)
        return self._train(kit, optimizer, rate)

    def fresh(
        self,
        name: str,
        *,
        change: Callable[[nn.Module], Any] | None = None,
        optimizer: str | None = None,
        rate: float = 1e-2,
    ) -> Training:
        """The same with a model of the case's own, which `change` may alter or replace before it is prepared."""
        kit = build(name, self.dtype)
        model = kit.model
        if change is not None:
            changed = change(model)
            model = changed if isinstance(changed, nn.Module) else model
        return self._train(Kit(self.accelerator.prepare(model), kit.batch, kit.loss), optimizer, rate)

    def module(self, module: nn.Module, *, rate: float = 0.1, optimizer: str | None = None) -> Training:
        """A module of the case's own with an optimizer, prepared."""
        kit = Kit(self.accelerator.prepare(module.to(self.dtype)), _no_batch, F.mse_loss)
        return self._train(kit, optimizer, rate)

    def _train(self, kit: Kit, optimizer: str | None, rate: float) -> Training:
        parameters = [p for p in kit.model.parameters() if p.requires_grad]
        # Adam divides by gradients' sizes and so amplifies what reordered sums differ by; float64 is to show exactness.
        if optimizer == "adamw" or (optimizer is None and not self.exact):
            made: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        else:
            made = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        return Training(self, kit, kit.model, self.accelerator.prepare(made))


def _no_batch(generator: torch.Generator, rows: int, length: int) -> Batch:
    raise NotImplementedError("the case draws its own batches")


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
        """The next batch."""
        return self.kit.batch(self.generator, rows, length)

    def forward(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        """Outputs and loss."""
        return self.kit.run(self.model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward; the first step's gradients are recorded."""
        self.run.accelerator.backward(loss)
        if self.step_number == 0:
            self.record_gradients()

    def record_gradients(self) -> None:
        """Each rank records those of its own parameters."""
        self.run.record_gradients(self.model)

    def update(self, loss: Any = None) -> None:
        """The optimizer's step; the loss is read afterwards."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        if loss is not None:
            self.run.record("loss", loss.item())

    def step(self, batch: Batch) -> None:
        """One whole step."""
        _, loss = self.forward(batch)
        self.backward(loss)
        self.update(loss)

    def evaluate(self, rows: int = 8, length: int = 12) -> None:
        """A forward pass without gradients, on a batch that is always the same."""
        self.model.eval()
        with torch.no_grad():
            outputs, loss = self.forward(self.kit.batch(torch.Generator().manual_seed(3), rows, length))
        self.run.record("evaluation loss", loss)
        self.run.record("evaluation", outputs.logits if hasattr(outputs, "logits") else outputs)
        self.model.train()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case by name. Cases with an equal `plain` do the same in a plain process, which is run once for all of them.

    `reference` is what the plain process does instead of `body`, where the promise is another than equality with the
    whole batch; `stated` then says which. `pending` says why the case is not expected to hold yet. `plan` is how the
    plan is turned after it was made (`fidelity_plans`).
    """

    name: str
    exercises: str
    body: Body
    plain: str
    model: str = "by hand"
    loss: str = "mse"
    ranks: tuple[int, ...] = (2,)
    options: Options = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    slow: bool = False
    pending: str = ""
    reference: Body | None = None
    stated: str = ""
    tolerance: float | None = None
    precision: str = "no"
    plan: str = ""

    @property
    def launch(self) -> str:
        """Cases with an equal launch may run in the same processes: the first plan decides who computes the losses."""
        return f"{self.precision}+plans" if self.plan else self.precision


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    """Register a case."""
    assert case.name not in CASES, case.name
    CASES[case.name] = case


def case(
    *,
    model: str = "by hand",
    loss: str = "mse",
    ranks: tuple[int, ...] = (2,),
    dtype: torch.dtype = torch.float64,
    microbatches: int | None = 4,
    slow: bool = False,
    pending: str = "",
    reference: Body | None = None,
    stated: str = "",
    tolerance: float | None = None,
    precision: str = "no",
    **options: Any,
) -> Callable[[Body], Body]:
    """Register a function as a case under its own name; its docstring says what it exercises."""
    if microbatches is not None:
        options["num_microbatches"] = microbatches

    def register(body: Body) -> Body:
        add(
            Case(
                name=body.__name__,
                exercises=(body.__doc__ or "").strip().splitlines()[0].rstrip("."),
                body=body,
                plain=body.__name__,
                model=model,
                loss=loss,
                ranks=ranks,
                options={"schedule": "1f1b", **options},
                dtype=dtype,
                slow=slow,
                pending=pending,
                reference=reference,
                stated=stated,
                tolerance=tolerance,
                precision=precision,
            )
        )
        return body

    return register


def token_loss(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """Cross entropy of the next token, as scripts write it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def late(seconds: float = 0.03) -> None:
    """Be a slow process for a moment."""
    time.sleep(seconds)
