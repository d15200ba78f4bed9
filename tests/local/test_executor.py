"""The executor with ranks as threads: the same programs as between processes, over `LocalTransport`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.graph import PlaceholderKind
from pfeife_accelerate.capture.model_capture import CapturedCall, ModelCapture
from pfeife_accelerate.capture.split import StagedGraph
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import Schedule, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.ir.program import InputKind
from pfeife_accelerate.runtime.executor import Executor
from pfeife_accelerate.runtime.local_transport import LocalTransport
from pfeife_accelerate.runtime.microbatch import Microbatch, divide, take
from pfeife_accelerate.runtime.step import MicrobatchInputs, RankProgram, StepInputs, StepState
from pfeife_accelerate.schedule import build
from pfeife_accelerate.session.programs import ProgramCache, Run
from tests.orders import random_order, random_placement

pytestmark = pytest.mark.local
CPU = torch.device("cpu")
BATCH = 7


class Net(nn.Module):
    """Eight layers with a long skip and a table of integers that every block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(6).flip(0)
        first = torch.tanh(self.layers[0](x))
        y = first
        for layer in self.layers[1:]:
            y = torch.relu(layer(y))[:, index] + y
        return y * first


class Branches(nn.Module):
    """A small tensor for the next layers, a large one for the last, one for both, and a table for both."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.wide = nn.Linear(6, 6), nn.Linear(6, 96)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.end = nn.Linear(96, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(6).flip(0)
        both = torch.tanh(self.start(x))
        large, small = torch.tanh(self.wide(x)), torch.sigmoid(x * both)
        y = self.layers[0](both) * small + both[:, index]
        for layer in self.layers[1:]:
            y = torch.relu(layer(y)) + y
        return self.end(large) * both + y[:, index]


class SquareLoss:
    """Mean square over the whole batch, a micro-batch at a time."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, microbatch: Microbatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return values[self.name].square().sum() / (microbatch.total * 6)


@pytest.fixture(scope="module")
def captured() -> tuple[Net, torch.Tensor, CapturedCall]:
    """A model, a batch, and its capture, made once."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(BATCH, 6, dtype=torch.float64)
    return model, x, ModelCapture(model, CPU).call((x,), {}, None)


def _inputs(call: CapturedCall, staged: StagedGraph, states: dict[str, Any], number: int, loss: Any) -> StepInputs:
    graph = call.graph

    def microbatch(rows: Microbatch) -> MicrobatchInputs:
        arguments = {
            str(p.index): take(call.arguments[p.index], 0, rows)
            for p in graph.placeholders
            if p.kind is PlaceholderKind.INPUT
        }
        bindings = {s: rows.count if s in graph.batch_symbols else v for s, v in call.bindings.items()}
        return MicrobatchInputs(
            rows=rows, arguments=arguments, sizes=staged.sizes(bindings), values=staged.values(bindings)
        )

    batches = tuple(microbatch(rows) for rows in divide(BATCH, number))
    return StepInputs(microbatches=batches, states=states, training=True, loss=loss)


def _run_threads(programs: list[Any], inputs: StepInputs) -> list[StepState]:
    transports = LocalTransport.make(len(programs), check_pair_order=True)
    states = [StepState(len(inputs.microbatches)) for _ in programs]
    errors: list[BaseException] = []

    def rank(r: int) -> None:
        try:
            Executor(transports[r], CPU).run(programs[r], inputs, states[r])
        except BaseException as error:
            errors.append(error)
            for transport in transports:
                transport.abort(str(error))

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return states


@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
@pytest.mark.parametrize(
    ("family", "num_ranks", "num_loops", "prefetch"),
    [
        (ScheduleFamily.GPIPE, 2, 1, 0),
        (ScheduleFamily.ONE_F_ONE_B, 2, 1, 1),
        (ScheduleFamily.ONE_F_ONE_B, 4, 1, 0),
        (ScheduleFamily.LOOPED, 2, 2, 1),
        (ScheduleFamily.GPIPE, 2, 3, 0),
    ],
)
def test_gradients_are_those_of_the_whole_batch_and_nothing_is_left_over(
    captured: Any, family: ScheduleFamily, num_ranks: int, num_loops: int, prefetch: int, num_microbatches: int
):
    spec = ScheduleSpec(
        family=family,
        num_ranks=num_ranks,
        num_loops=num_loops,
        num_microbatches=num_microbatches,
        prefetch_forwards=prefetch,
    )
    _check_gradients(captured, build(spec), num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("recompute", [(), (0,), (1, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize(
    ("family", "num_ranks"), [(ScheduleFamily.ZB_H1, 4), (ScheduleFamily.ZB_V, 2), (ScheduleFamily.GPIPE, 2)]
)
def test_backwards_in_halves_and_stages_that_run_again_give_the_same_gradients(
    captured: Any, family: ScheduleFamily, num_ranks: int, recompute: tuple[int, ...], num_microbatches: int
):
    """Also where fewer micro-batches come than were planned."""
    spec = ScheduleSpec(family=family, num_ranks=num_ranks, num_loops=4 // num_ranks, num_microbatches=4)
    programs = _check_gradients(captured, build(spec), num_microbatches, recompute)
    stages = {number: stage for program in programs for number, stage in program.stages.items()}
    for number, stage in stages.items():
        puts_off = any(read.kind is InputKind.LATER for read in stage.inputs)
        assert puts_off is (family is not ScheduleFamily.GPIPE and number not in recompute)
        assert (stage.repetition is not None) is (number in recompute)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_on_any_placement_gives_the_same_gradients(captured: Any, seed: int):
    num_ranks = 1 + seed % 4
    stage_ranks = random_placement(num_ranks, num_ranks + seed % 5, seed)
    spec = ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=num_ranks, num_microbatches=3)
    order = Schedule.parse(spec, random_order(stage_ranks, 3, seed, is_split=seed % 2 == 1), stage_ranks)
    recompute = tuple(stage for stage in range(order.num_stages) if (stage + seed) % 3 == 0)
    for num_microbatches in (2, 3, 5):
        _check_gradients(captured, order, num_microbatches, recompute)


def _check_gradients(
    captured: Any, order: Schedule, num_microbatches: int, recompute: tuple[int, ...] = ()
) -> list[RankProgram]:
    call = captured[2]
    legal = [p for p, allowed in enumerate(call.graph.cut_allowed) if allowed]
    stages = order.num_stages
    cuts = tuple(legal[len(legal) * k // stages] for k in range(1, stages))
    return _check_cut(captured, order, num_microbatches, cuts, recompute)


def _check_cut(
    captured: Any, order: Schedule, num_microbatches: int, cuts: tuple[int, ...], recompute: tuple[int, ...] = ()
) -> list[RankProgram]:
    model, x, call = captured
    model.zero_grad()
    model(x).square().mean().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    name = call.graph.result_names()[-1]
    caches = [ProgramCache(order, rank, recompute) for rank in range(order.num_ranks)]
    staged = [cache.staged(call.graph, cuts, (name,)) for cache in caches]
    programs = [
        cache.program(one, (name,), (name,), Run.PLANNED, num_microbatches)
        for cache, one in zip(caches, staged, strict=True)
    ]
    parameters = dict(model.named_parameters())
    inputs = _inputs(call, staged[0], parameters, num_microbatches, SquareLoss(name))
    read_by = {
        number: [i.name for i in stage.inputs if i.kind is InputKind.STATE]
        for program in programs
        for number, stage in program.stages.items()
    }
    when_done: dict[int, dict[str, torch.Tensor]] = {}

    def note(stage: int) -> None:
        assert stage not in when_done
        when_done[stage] = {n: parameters[n].grad.clone() for n in read_by[stage]}

    states = _run_threads(programs, replace(inputs, on_stage_done=note))

    assert sorted(when_done) == sorted(read_by)
    for found in when_done.values():
        for parameter_name, gradient in found.items():
            assert torch.equal(gradient, parameters[parameter_name].grad), "it is whole when the stage is done"
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[parameter_name], rtol=1e-12, atol=1e-14)
    for state in states:
        assert not state.outputs, "results of stages are freed by their backward"
        assert not state.losses and not state.before
        assert not state._weight_gradients, "what weight gradients need is freed when they have been computed"
        assert not any(state.values), "values of other stages are freed when no action reads them any more"
    return programs


def test_a_stage_is_done_when_what_it_passes_on_has_left_and_before_the_next_computation(captured: Any):
    spec = ScheduleSpec(family=ScheduleFamily.LOOPED, num_ranks=2, num_loops=2, num_microbatches=2)
    for program in _check_gradients(captured, build(spec), 2):
        kinds = [str(action) for action in program.actions]
        for end, (stage,) in program.ends_of_stages.items():
            assert f"{stage}B1" in kinds[: end + 1]
            assert not any(a.kind.is_backward and a.stage == stage for a in program.actions[end + 1 :])
            if stage > 0:
                assert any(kind.startswith(f"{stage - 1}SEND_B1>{stage}@") for kind in kinds[: end + 1])
            assert all(action.kind.is_compute for action in program.actions[end + 1 : end + 2])
        assert len(program.ends_of_stages) == 2


@pytest.fixture(scope="module")
def branches() -> tuple[Branches, torch.Tensor, CapturedCall]:
    """As `captured`, of a model whose first operations are read by several stages of a rank."""
    torch.manual_seed(0)
    model, x = Branches().double(), torch.randn(BATCH, 6, dtype=torch.float64)
    return model, x, ModelCapture(model, CPU).call((x,), {}, None)


def _cut_before(call: CapturedCall, *parameters: str) -> tuple[int, ...]:
    """Cuts directly before the operations that read these parameters."""
    graph = call.graph
    return tuple(
        next(p for p, op in enumerate(graph.ops) if f"{parameter}.weight" in graph.states_of(op))
        for parameter in parameters
    )


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("family", [ScheduleFamily.GPIPE, ScheduleFamily.LOOPED])
def test_what_stages_of_a_rank_read_first_goes_to_each_apart_and_once(
    branches: Any, family: ScheduleFamily, num_microbatches: int
):
    order = build(ScheduleSpec(family=family, num_ranks=2, num_loops=2, num_microbatches=num_microbatches))
    cuts = _cut_before(branches[2], "layers.0", "layers.2", "end")
    programs = _check_cut(branches, order, num_microbatches, cuts)

    assert programs[0].messages == programs[1].messages
    messages = programs[0].messages
    values = branches[2].graph.node_of
    width = {name: values[name].meta["example_value"].shape[-1] for m in messages.values() for name in m.values}
    near, far = messages[0, 1], messages[0, 3]
    assert [width[name] for name in far.values] == [96] and far.with_grad == far.values
    assert len(near.values) == 3 and len(near.with_grad) == 2 and 96 not in map(width.get, near.values)
    assert (near.first_number, far.first_number) == (0, 3), "no two tensors of a micro-batch have the same tag"
    both = [name for name in near.values if programs[1].readers[name] == (1, 3)]
    assert len(both) == 2 and len(set(both) & set(near.with_grad)) == 1, "a tensor and the table, sent once"
    transfers = [str(a) for a in programs[1].actions if a.stage == 0 and a.microbatch == 0 and a.reader is not None]
    assert sorted(transfers) == ["0RECV_F0>1@0", "0RECV_F0>3@0", "0SEND_B0>1@0", "0SEND_B0>3@0"]


def test_an_error_in_a_stage_reaches_the_caller_and_stops_the_other_ranks(captured: Any):
    model, _, call = captured
    name = call.graph.result_names()[-1]
    legal = [p for p, allowed in enumerate(call.graph.cut_allowed) if allowed]
    spec = ScheduleSpec(family=ScheduleFamily.ONE_F_ONE_B, num_ranks=2, num_microbatches=2)
    caches = [ProgramCache(build(spec), rank) for rank in range(2)]
    staged = [cache.staged(call.graph, (legal[len(legal) // 2],), (name,)) for cache in caches]
    programs = [c.program(s, (name,), (name,), Run.PLANNED, 2) for c, s in zip(caches, staged, strict=True)]
    broken = dict(model.named_parameters())
    broken["layers.7.weight"] = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises((RuntimeError, PfeifeError), match="mat1 and mat2"):
        _run_threads(programs, _inputs(call, staged[0], broken, 2, SquareLoss(name)))
