"""Stages that keep their inputs alone and compute their activations again: only memory may tell the difference."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pfeife_accelerate.capture.graph import PlaceholderKind
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.split import StagedGraph
from pfeife_accelerate.compat import storage_id
from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.ir import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.runtime.executor import Executor
from pfeife_accelerate.runtime.local_transport import LocalTransport
from pfeife_accelerate.runtime.microbatch import Microbatch, divide, take
from pfeife_accelerate.runtime.step import MicrobatchInputs, StepInputs, StepState
from pfeife_accelerate.schedule import build
from pfeife_accelerate.session.new_plan import search_options
from pfeife_accelerate.session.programs import ProgramCache, Run

pytestmark = pytest.mark.local
CPU = torch.device("cpu")
MICROBATCHES = 3


class _Sum:
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def forward(self, microbatch: Microbatch, values: Any) -> torch.Tensor:
        self.calls += 1
        return values[self.name].square().sum()


class _Kept:
    """The bytes of storages that autograd keeps, those of parameters aside, and the most there were."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {storage_id(p) for p in model.parameters()}
        self.counts: dict[int, int] = {}
        self.bytes = self.peak = 0

    def hooks(self) -> Any:
        kept = self

        class Packed:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor, self.storage = tensor, storage_id(tensor)
                if kept.counts.setdefault(self.storage, 0) == 0 and self.storage not in kept.known:
                    kept.bytes += tensor.untyped_storage().nbytes()
                    kept.peak = max(kept.peak, kept.bytes)
                kept.counts[self.storage] += 1

            def __del__(self) -> None:
                kept.counts[self.storage] -= 1
                if kept.counts[self.storage] == 0 and self.storage not in kept.known:
                    kept.bytes -= self.tensor.untyped_storage().nbytes()

        return torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor)


class Captured:
    """A model, a batch and its capture, made once; `reset` puts back what steps change."""

    def __init__(self, make: Callable[[], nn.Module], autocast: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model, self.x, self.autocast = make(), torch.randn(8, 6), autocast
        self._first = copy.deepcopy((self.model.state_dict(), self.x))
        self.capture = ModelCapture(self.model, CPU)
        self.call = self.capture.call((self.x,), {}, autocast)

    def reset(self) -> None:
        """As made."""
        self.model.load_state_dict(self._first[0])
        self.model.zero_grad()
        self.x.copy_(self._first[1])


_captured = functools.cache(Captured)


class Step:
    """One step of a model on one rank with two stages."""

    def __init__(
        self,
        captured: Captured,
        recompute: tuple[int, ...],
        *,
        family: ScheduleFamily = ScheduleFamily.GPIPE,
        stages: int = 2,
    ) -> None:
        call, graph, x = captured.call, captured.call.graph, captured.x
        name = graph.result_names()[-1]
        is_v = family is ScheduleFamily.ZB_V
        order = build(ScheduleSpec(family=family, num_ranks=1, num_loops=2 if is_v else stages, num_microbatches=3))
        programs = ProgramCache(order, 0, recompute)
        legal = [p for p, allowed in enumerate(graph.cut_allowed) if allowed]
        cuts = tuple(legal[len(legal) * k // stages] for k in range(1, stages))
        self.staged: StagedGraph = programs.staged(graph, cuts, (name,))
        program = programs.program(self.staged, (name,), (name,), Run.PLANNED, MICROBATCHES)
        batches = []
        for rows in divide(len(x), MICROBATCHES):
            bindings = {s: rows.count if s in graph.batch_symbols else v for s, v in call.bindings.items()}
            arguments = {str(p.index): take(call.arguments[p.index], 0, rows)
                         for p in graph.placeholders if p.kind is PlaceholderKind.INPUT}  # fmt: skip
            batches.append(
                MicrobatchInputs(
                    rows=rows, arguments=arguments, sizes=self.staged.sizes(bindings),
                    values=self.staged.values(bindings),
                )
            )  # fmt: skip
        self.loss, self.kept = _Sum(name), _Kept(captured.model)
        inputs = StepInputs(
            microbatches=tuple(batches), states=captured.capture.states(), training=True, loss=self.loss, seed=5,
            autocast=captured.autocast,
        )  # fmt: skip
        self.state = StepState(MICROBATCHES)
        with self.kept.hooks():
            Executor(LocalTransport.make(1)[0], CPU).run(program, inputs, self.state)


class Normed(nn.Module):
    """Dropout and BatchNorm, a counter that the output depends on, a part without gradients, an input changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        y = x
        for number, layer in enumerate(self.layers):
            y = torch.tanh(layer(y)) * (1 + self.count)
            self.count.add_(0.25)
            y = nn.functional.dropout(y, 0.3)
            if number % 3 == 0:
                y = self.norms[number // 3](y)
            with torch.no_grad():
                scale = torch.sigmoid(y * 2).mean()
            y = y * scale
        return y


class Regions(nn.Module):
    """Regions that the model computes again itself, with BatchNorm and dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 6))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _facts(
    make: Callable[[], nn.Module], recompute: tuple[int, ...], autocast: Any = None, **kwargs: Any
) -> tuple[dict[str, Any], Step]:
    captured = _captured(make, autocast)
    captured.reset()
    step = Step(captured, recompute, **kwargs)
    found = {name: p.grad for name, p in captured.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in captured.model.named_buffers()}
    return {**found, **buffers, "x": captured.x.clone(), "calls": step.loss.calls}, step


@pytest.mark.parametrize("family", [ScheduleFamily.GPIPE, ScheduleFamily.ZB_V])
@pytest.mark.parametrize("autocast", [None, ("cpu", torch.bfloat16)], ids=["plain", "autocast"])
@pytest.mark.parametrize("make", [Normed, Regions])
def test_masks_statistics_and_what_forward_changes_are_as_without(make: Any, autocast: Any, family: ScheduleFamily):
    """Bit by bit; buffers and the input have been changed once, the loss has been computed once a micro-batch."""
    expected, plain = _facts(make, (), autocast, family=family)
    assert not any(stage.repetition for stage in plain.staged.stages)
    found, step = _facts(make, (0, 1), autocast, family=family)
    assert all(stage.repetition for stage in step.staged.stages)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert expected["calls"] == MICROBATCHES


def test_one_stage_alone_may_run_again():
    expected, _ = _facts(Normed, ())
    for recompute in ((0,), (1,)):
        found, step = _facts(Normed, recompute)
        assert tuple(s.index for s in step.staged.stages if s.repetition) == recompute
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(*_blocks(6)), Normed])
def test_less_is_kept(make: Any):
    """All activations of all micro-batches without; of one stage and micro-batch at a time with."""
    _, plain = _facts(make, (), stages=4)
    _, step = _facts(make, (0, 1, 2, 3), stages=4)
    assert plain.kept.bytes == step.kept.bytes == 0, "everything is freed in the end"
    assert step.kept.peak < 0.3 * plain.kept.peak, (step.kept.peak, plain.kept.peak)


def _blocks(number: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6), nn.Tanh()) for _ in range(number)]


class Overwriting(nn.Module):
    """Changes a parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))


def test_a_stage_that_changes_a_parameter_runs_once():
    """Its gradient could not reach the copy that a second run would be given."""
    expected, _ = _facts(Overwriting, ())
    found, step = _facts(Overwriting, (0, 1))
    assert [stage.repetition is None for stage in step.staged.stages] == [True, False]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_options_of_both_reach_the_search():
    assert (search_options(PfeifePlugin()).backward, search_options(PfeifePlugin()).recompute) == ("whole", "auto")
    options = search_options(PfeifePlugin(backward="split", recompute="none"))
    assert (options.backward, options.recompute) == ("split", "none")
