"""Stages compiled each by itself: the same values and gradients, and no more compilations than there are variants."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pfeife_accelerate.capture.compiled import Compilation
from pfeife_accelerate.capture.model_capture import CapturedCall, ModelCapture
from pfeife_accelerate.capture.split import StagedGraph, split
from pfeife_accelerate.capture.stage import make_stage
from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.ir.program import InputKind
from pfeife_accelerate.schedule import build
from pfeife_accelerate.session.compilation import compilation_of
from pfeife_accelerate.session.programs import ProgramCache

pytestmark = pytest.mark.local
CPU = torch.device("cpu")
SEED = 5


class Counting:
    """A backend that runs what it is given, and counts how often it was given something."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.graphs.append(gm)
        return gm.forward


COUNTING = Counting()


@pytest.fixture(autouse=True)
def counting() -> Iterator[Counting]:
    """The backend under its name, with nothing counted."""
    torch.compiler.reset()
    if "counting" not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(COUNTING, name="counting")
    COUNTING.graphs.clear()
    yield COUNTING
    torch.compiler.reset()


class Net(nn.Module):
    """Blocks over (batch, length, 8), with a head that is read over the length."""

    def __init__(self, *kinds: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in kinds)
        self.register_buffer("steps", torch.zeros(8))
        self.kinds = kinds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = kind(self, layer, x)
        return x.transpose(1, 2).reshape(x.shape[0], 8 * x.shape[1])


def _plain(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer(x)) + x


def _dropout(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(layer(x)), 0.4) + x


def _half(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.tanh(layer(x)) + x
    with torch.autocast("cpu", enabled=False):
        return layer(x.float())


def _no_grad(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.tanh(layer(x)).abs()
    return layer(x) * scale


def _counts(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.steps.add_(1.5)
    return torch.tanh(layer(x)) + x * net.steps


def _region(inner: Any, **options: Any) -> Any:
    def block(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(partial(inner, net, layer), x, use_reentrant=False, **options)

    return block


_KEPT = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


def _call(model: nn.Module, lengths: tuple[int, ...] = (5,)) -> CapturedCall:
    """The last of calls of these lengths."""
    capture = ModelCapture(model, CPU)
    return [capture.call((torch.randn(6, length, 8),), {}, None) for length in lengths][-1]


def _staged(call: CapturedCall, cuts: tuple[int, ...], backend: str | None) -> StagedGraph:
    how = None if backend is None else Compilation(backend=backend)
    return split(call.graph, cuts, call.graph.result_names(), make=partial(make_stage, compilation=how))


def _run(
    staged: StagedGraph, model: nn.Module, x: torch.Tensor, seed: int = SEED, *, training: bool = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The stages one after the other as the executor runs them: the result, and the gradients of its squares."""
    graph = staged.graph
    bindings = {s: v for p in graph.placeholders for s, v in zip(_symbols(p.example), x.shape, strict=False) if s}
    states = dict(model.named_parameters()) | dict(model.named_buffers())
    model.zero_grad()
    sizes, values, made = staged.sizes(bindings), {}, []
    source: dict[Any, Any] = {InputKind.STATE: states, InputKind.SIZE: sizes, InputKind.VALUE: values}
    for stage in staged.stages:
        given = [
            seed if i.kind is InputKind.SEED else x if i.kind is InputKind.MODEL_INPUT else source[i.kind][i.name]
            for i in stage.inputs
        ]
        with torch.set_grad_enabled(training):
            results = dict(zip(stage.outputs, stage.run(*given), strict=True))
        made.append(results)
        values.update({n: r.detach().requires_grad_(training and r.requires_grad) for n, r in results.items()})
    (name,) = graph.result_names()
    if training:
        values[name].grad = 2 * values[name].detach()
        for results in reversed(made):
            roots = [(r, values[n].grad) for n, r in results.items() if values[n].grad is not None]
            torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])
    return values[name].detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _symbols(example: Any) -> tuple[Any, ...]:
    if not isinstance(example, torch.Tensor) or isinstance(example, nn.Parameter):
        return ()
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else None for size in example.shape)


def _cuts(call: CapturedCall, number: int = 1) -> tuple[int, ...]:
    legal = [p for p, allowed in enumerate(call.graph.cut_allowed) if allowed]
    return tuple(legal[len(legal) * k // (number + 1)] for k in range(1, number + 1))


def _same(found: Any, wanted: Any, tolerance: float) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == wanted[1].keys() != set()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance)


MODELS = {
    "modes": (_plain, _dropout, _no_grad, _half),
    "regions": (_region(_dropout), _region(_half), _region(_plain, context_fn=_KEPT)),
}


@pytest.mark.parametrize("kinds", MODELS)
def test_compiled_stages_give_the_same_values_and_gradients(kinds: str):
    torch.manual_seed(0)
    model = Net(*MODELS[kinds])
    call = _call(model)
    legal = [p for p, allowed in enumerate(call.graph.cut_allowed) if allowed]
    cuts = (legal[len(legal) // 2 + 1],)  # within a mode, a region
    plain, compiled = _staged(call, cuts, None), _staged(call, cuts, "aot_eager")
    for rows, seed in ((3, 1), (3, 2), (2, 3)):
        x = torch.randn(rows, 5, 8)
        wanted = _run(plain, model, x, seed)
        _same(_run(compiled, model, x, seed), wanted, 1e-6)
    _same_value = _run(compiled, model, x, seed, training=False)[0]
    torch.testing.assert_close(_same_value, wanted[0], rtol=1e-6, atol=1e-6)


def test_buffers_are_changed_once_for_each_micro_batch():
    torch.manual_seed(0)
    model = Net(_counts, _counts)
    call = _call(model)
    x = torch.randn(3, 5, 8)
    found = []
    for backend in (None, "aot_eager"):
        model.steps.zero_()
        staged = _staged(call, _cuts(call), backend)
        found.append([(_run(staged, model, x), model.steps.clone()) for _ in range(2)])
    for (plain, steps), (compiled, also) in zip(*found, strict=True):
        _same(compiled, plain, 1e-6)
        assert torch.equal(steps, also)
    assert model.steps[0].item() == 2 * 2 * 1.5


def test_sizes_that_change_are_compiled_once_more_and_then_never(counting: Counting):
    torch.manual_seed(0)
    model = Net(_plain, _dropout)
    call = _call(model)
    staged = _staged(call, _cuts(call), "counting")
    counts = []
    for step, rows in enumerate([3, 3, 2, 4, 5, 3, 2]):
        _run(staged, model, torch.randn(rows, 5, 8), seed=step)
        counts.append(len(counting.graphs))
    first = counts[0]
    assert first >= 2
    assert counts == [first, first, *[2 * first] * 5], "rows are a symbol in the second program"
    for _ in range(2):
        _run(staged, model, torch.randn(3, 5, 8), training=False)
    assert len(counting.graphs) == 3 * first


def test_where_lengths_have_changed_one_program_is_for_all_sizes(counting: Counting):
    torch.manual_seed(0)
    model = Net(_plain, _plain)
    call = _call(model, (5, 7))
    staged = _staged(call, _cuts(call), "counting")
    for rows, length in ((3, 7), (3, 7), (2, 7), (3, 9), (4, 6)):
        x = torch.randn(rows, length, 8)
        _same(_run(staged, model, x), _run(_staged(call, _cuts(call), None), model, x), 1e-6)
    assert len(counting.graphs) == 2


def test_a_stage_is_compiled_once_whatever_is_needed_in_the_end():
    call = _call(Net(_plain, _plain, _plain))
    (name,) = call.graph.result_names()
    spec = ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=3, num_microbatches=2)
    programs = ProgramCache(build(spec), 0, compilation=Compilation(backend="counting"))
    cuts = _cuts(call, 2)
    middle = call.graph.ops[cuts[0]].name
    one, other = programs.staged(call.graph, cuts, (name,)), programs.staged(call.graph, cuts, (name, middle))
    same = [a.run is b.run for a, b in zip(one.stages, other.stages, strict=True)]
    assert same == [True, False, True]


def test_compiled_stages_of_a_plan_in_halves_do_all_at_once_and_say_so(caplog: pytest.LogCaptureFixture):
    call = _call(Net(_plain, _plain, _plain))
    needed = tuple(call.graph.result_names())
    order = build(ScheduleSpec(family=ScheduleFamily.ZB_H1, num_ranks=2, num_microbatches=2))
    plain = ProgramCache(order, 0).staged(call.graph, _cuts(call), needed)
    assert any(i.kind is InputKind.LATER for stage in plain.stages for i in stage.inputs)
    with caplog.at_level("WARNING", logger="pfeife_accelerate"):
        cache = ProgramCache(order, 0, compilation=Compilation(backend="counting"))
    assert "compiled stages compute the gradients of weights" in caplog.text
    stages = cache.staged(call.graph, _cuts(call), needed).stages
    assert not any(i.kind is InputKind.LATER for stage in stages for i in stage.inputs)


def test_too_many_variants_of_a_stage_are_an_error_and_not_an_end_of_compiling(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pfeife_accelerate.capture.compiled._VARIANTS", 1)
    model = Net(_plain, _plain)
    call = _call(model)
    staged = _staged(call, _cuts(call), "counting")
    _run(staged, model, torch.randn(3, 5, 8))
    _run(staged, model, torch.randn(3, 5, 8))
    with pytest.raises(PfeifeError, match="PF173 Stage0 cannot be compiled by 'counting'"):
        _run(staged, model, torch.randn(4, 5, 8))


def _relu(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(layer(x)) + x


def test_what_a_backend_cannot_compile_is_refused_with_its_place():
    model = Net(_relu, _plain)
    call = _call(model)
    staged = _staged(call, _cuts(call), "relu_compile_error_TESTING_ONLY")
    with pytest.raises(PfeifeError) as refusal:
        _run(staged, model, torch.randn(3, 5, 8))
    text = str(refusal.value)
    assert text.startswith("PF173 Stage0 cannot be compiled by 'relu_compile_error_TESTING_ONLY'")
    assert "test_compiled.py:" in text and "torch.relu(layer(x)) + x" in text
    assert "ReluCompileError" in text and "compile: none" in text


def test_an_error_of_the_model_itself_stays_what_it_is():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8))
    call = ModelCapture(model, CPU).call((torch.zeros(6, 5, dtype=torch.int64),), {}, None)
    staged = _staged(call, (1,), "eager")
    with pytest.raises(IndexError, match="out of range"):
        _run(staged, model, torch.full((3, 5), 7))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    torch.manual_seed(0)
    model = Net(_plain, _dropout, _region(_plain), _no_grad, _counts)
    call = _call(model)
    found = []
    for backend in (None, "inductor"):
        staged = _staged(call, _cuts(call), backend)
        model.steps.zero_()
        torch.manual_seed(1)
        found.append([_run(staged, model, torch.randn(rows, 5, 8), rows) for rows in (3, 3, 2, 4)])
    for plain, compiled in zip(*found, strict=True):
        _same(compiled, plain, 1e-5)


# -- the option --------------------------------------------------------------------------------------------------------


def _dynamo(**given: Any) -> Any:
    from accelerate.utils import TorchDynamoPlugin

    return TorchDynamoPlugin(**{"backend": "no", **given})


def test_the_option_decides_and_without_it_accelerates_own():
    assert compilation_of(PfeifePlugin(), _dynamo()) is None
    assert compilation_of(PfeifePlugin(compile="none"), _dynamo(backend="inductor")) is None
    assert compilation_of(PfeifePlugin(), _dynamo(backend="inductor", disable=True)) is None
    chosen = compilation_of(PfeifePlugin(compile="aot_eager"), _dynamo(backend="inductor"))
    assert chosen == Compilation(backend="aot_eager")
    followed = compilation_of(PfeifePlugin(), _dynamo(backend="inductor", mode="default", fullgraph=True))
    assert followed == Compilation(backend="inductor", mode="default", fullgraph=True)


def test_a_backend_of_another_name_is_refused_with_the_nearest():
    with pytest.raises(PfeifeError, match="PF171 'inducter' is no Dynamo backend") as refusal:
        compilation_of(PfeifePlugin(compile="inducter"), _dynamo())
    assert "did you mean 'inductor'?" in str(refusal.value) and "pfeife_config: compile" in str(refusal.value)
    with pytest.raises(PfeifeError, match="dynamo_config: dynamo_backend"):
        compilation_of(PfeifePlugin(), _dynamo(backend="ofi"))


@pytest.mark.parametrize(
    ("plugin", "given", "told"),
    [
        ({"compile": "cudagraphs"}, {}, "the backend 'cudagraphs'"),
        ({}, {"backend": "inductor", "mode": "reduce-overhead"}, "the mode 'reduce-overhead'"),
        ({}, {"backend": "inductor", "options": {"triton.cudagraphs": True}}, "the option 'triton.cudagraphs'"),
    ],
)
def test_cuda_graphs_are_refused(plugin: dict[str, Any], given: dict[str, Any], told: str):
    with pytest.raises(PfeifeError, match=f"PF172 stages cannot be compiled with {told}"):
        compilation_of(PfeifePlugin(**plugin), _dynamo(**given))
