"""One call of a pipelined model: its arguments, how far it has come, and the values it made.

The same script runs on every rank, so the n-th call on one rank is the n-th on all: `number` names it between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import sympy
import torch

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf, Record
from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.inputs import InputLink
from pfeife_accelerate.capture.readable import readable_values
from pfeife_accelerate.capture.split import StagedGraph, value_info
from pfeife_accelerate.compat import expression_of
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.program import ValueInfo
from pfeife_accelerate.runtime import microbatch
from pfeife_accelerate.runtime.step import StepInputs, StepState
from pfeife_accelerate.session.call_values import CallValues

if TYPE_CHECKING:
    from pfeife_accelerate.session.guess import Guess
    from pfeife_accelerate.session.model import PipelinedModel


class Progress(IntEnum):
    """How far a call has come on this rank."""

    PENDING = 0
    FORWARDED = 1
    DONE = 2


class Call:
    """One call of a pipelined model; see the module's docstring."""

    def __init__(
        self,
        number: int,
        resolver: PipelinedModel,
        graph: CapturedGraph,
        arguments: tuple[Any, ...],
        bindings: Mapping[Any, int],
        autocast: tuple[str, torch.dtype] | None,
        links: tuple[InputLink, ...] = (),
        versions: tuple[tuple[torch.Tensor, int], ...] = (),
    ) -> None:
        self.number = number
        self.resolver = resolver
        self.graph = graph
        self.arguments = arguments
        self.bindings = bindings
        self.autocast = autocast
        self.links = links
        self._versions = versions
        self.progress = Progress.PENDING
        self.state: StepState | None = None
        self.values = CallValues()
        self.scalars: list[float] | None = None
        """The loss and the other one-element values of its expression, once the loss rank has sent them."""
        self.held_gradients: dict[int, dict[str, torch.Tensor | None]] = {}
        """Gradients computed before this rank's script asked for them by its `backward` of that number."""
        self.input_gradients: dict[int, torch.Tensor] = {}
        """Gradients of the arguments in `links`, by index, after a backward."""
        self._leaves: WeakValueDictionary[str, Leaf] = WeakValueDictionary()
        """Leaves that the script can still reach."""
        self._spared: frozenset[str] = frozenset()
        self.has_run = False
        """Whether a forward has run: every rank's script has made the call."""
        self.seed = 0
        """What the random operations derive their seeds from; the leading rank's once a schedule is announced."""
        self.generators = ""
        """How far this rank's generators of random numbers were."""
        self.alone = False
        """Whether only this rank's script has made the call."""
        self.asked = 0
        """How often this rank's script has called `backward`."""
        self.answered = 0
        """How many of these (and those to come) have been computed."""
        self.retained = False
        """Whether the last `backward` asked for another one."""
        self.guess: Guess | None = None
        """What the backward that has run was for, if it ran before the script called `backward`."""
        self.buffers_before: dict[str, torch.Tensor] | None = None
        """Buffers as the first forward found them, where it changes any."""
        self.recorded: list[ref[Record]] = []
        """What the script has done with the outputs, in order, as far as it still matters."""
        self.staged: StagedGraph
        self.inputs: StepInputs
        self.loss_values: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int:
        """Rows of the whole batch."""
        sizes = [self.bindings[s] for s in self.graph.batch_symbols if s in self.bindings]
        return sizes[0] if sizes else 1

    @property
    def differentiable(self) -> bool:
        """Whether this rank's script may still call `backward`; the schedule may have run before that."""
        return self.asked == 0 or self.retained

    def ask(self, *, retain: bool) -> int:
        """This rank's script has called `backward`; gives the number of this backward.

        Raises: PfeifeError PF506 if no further backward can go through this call.
        """
        if not self.differentiable:
            raise _second_backward()
        request, self.asked, self.retained = self.asked, self.asked + 1, retain
        if self.answered <= request and self.progress is Progress.DONE:
            self.progress = Progress.PENDING  # the graphs were freed: forward once more, on the same random numbers
        return request

    def begin(self, request: int, guess: Guess | None) -> None:
        """A forward is about to run for that backward; what was computed for it before was not what it asked for."""
        if self.answered > request:
            self.reopen(request)
        self.guess, self.input_gradients = guess, {}
        for link in self.links:
            link.leaf.grad = None
        self.check_unchanged()

    def reopen(self, request: int) -> None:
        """What has been computed for a backward is not what it asked for: it is to be computed once more."""
        self.held_gradients.pop(request, None)
        self.answered, self.guess, self.progress = request, None, Progress.PENDING

    def note(self, record: Record) -> None:
        """The script has computed something from the outputs."""
        if self.asked == 0:
            self.recorded.append(ref(record))

    def check_unchanged(self) -> None:
        """Raises: PfeifeError PF507 if the script has changed an argument in place since the call."""
        for argument, version in self._versions:
            if argument._version != version:
                raise _argument_changed(argument)

    def micro_bindings(self, rows: int) -> dict[Any, int]:
        """Values of the size symbols in a micro-batch of that many rows."""
        return {s: rows if s in self.graph.batch_symbols else value for s, value in self.bindings.items()}

    def deferred(self, name: str) -> DeferredTensor:
        """A deferred tensor for one value of the graph."""
        leaf = self._leaves.get(name)
        if leaf is None:
            leaf = self._leaves[name] = self._leaf(name)
        info = self.info(name)
        device = self.graph.node_of[name].meta["example_value"].device
        return DeferredTensor.leaf(leaf, info.shape, info.dtype, device, info.requires_grad)

    def _leaf(self, name: str) -> Leaf:
        example = self.graph.node_of[name].meta["example_value"]
        dim = self.graph.batch_dim(example)
        rows = 1
        if dim is not None:
            ones = {symbol: sympy.Integer(value) for symbol, value in self.micro_bindings(1).items()}
            rows = int(expression_of(example.shape[dim]).xreplace(ones))
        return Leaf(self.resolver, self, name, dim, rows)

    def wants_kept(self, name: str) -> bool:
        """Whether the script may still read a value: deferred tensors refer to it, and not only by known scalars."""
        return name in self._leaves and name not in self._spared

    def spare(self, known: Iterable[Record]) -> None:
        """These scalars will be known after the step: what the script can reach through them alone need not be kept."""
        self._spared = frozenset(self._leaves) - readable_values(self, list(known))

    def reachable(self) -> tuple[str, ...]:
        """Values that the script's deferred tensors still refer to."""
        return tuple(sorted(self._leaves))

    def info(self, name: str) -> ValueInfo:
        """Shape and dtype of a whole-batch value."""
        return value_info(self.graph, name, self.bindings)

    def scalar_tensors(self) -> list[torch.Tensor]:
        """The known one-element values, to be passed on."""
        return [torch.tensor(value, dtype=torch.float64) for value in self.scalars or ()]

    def release(self) -> None:
        """Free all that only a schedule needs."""
        self.state = None
        self.inputs = replace(self.inputs, microbatches=())

    def keep(self, kept: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
        """Hold the micro-batches' values for whoever reads the whole batch's."""
        microbatches = [data.rows for data in self.inputs.microbatches]
        for name, parts in kept.items():
            dim = self.graph.batch_dim(self.graph.node_of[name].meta["example_value"])
            ordered = [parts[i] for i in sorted(parts)]
            if dim is None:
                self.values[name] = ordered[0]
            else:
                self.values.keep_parts(name, partial(microbatch.whole, ordered, dim, microbatches))


def _second_backward() -> PfeifeError:
    return PfeifeError(
        id="PF506",
        what="backward was called a second time through the same call of the model",
        why="the stages' graphs were freed by the first",
        hints=(
            "pass retain_graph=True to the first",
            "add the losses and call backward once",
            "call the model again",
        ),
    )


def refuse_second_backward(loss: Any) -> None:
    """Raises: PfeifeError PF506 for a loss through whose calls `backward` has gone, and freed their graphs."""
    if isinstance(loss, DeferredTensor) and loss.record.fake.requires_grad and not loss.record.live:
        raise _second_backward()


def lonely_training_call() -> PfeifeError:
    """The error for a call in training that other ranks' scripts have passed by."""
    return PfeifeError(
        id="PF431",
        what="the model was called on one process of the pipeline only, with gradients enabled",
        why="the other processes of the pipeline have gone on to a barrier without making this call",
        hints=("call it under torch.no_grad() if it is an evaluation", "call it on all processes"),
    )


def _argument_changed(argument: torch.Tensor) -> PfeifeError:
    return PfeifeError(
        id="PF507",
        what="an argument of the model was changed in place between the call and its use "
        f"(shape {tuple(argument.shape)}, {argument.dtype})",
        why="a pipelined model runs when its loss is differentiated or a result is read, not when it is called",
        hints=("change it after backward", "pass a copy: tensor.clone()"),
    )


def promised(value: float, record: Record) -> Any:
    """A promise of a one-element value that is known as a number."""

    def give() -> torch.Tensor:
        fake = record.fake
        return torch.tensor(value, dtype=fake.dtype, device=fake.device).reshape(fake.shape)

    return give
