"""Values that each reading stage computes anew: which may be, which are worth it, and that nothing else changes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pfeife_accelerate.capture.copied import alike, copyable
from pfeife_accelerate.capture.model_capture import CapturedCall, ModelCapture
from pfeife_accelerate.capture.op_graph import to_op_graph
from pfeife_accelerate.capture.split import StagedGraph, split
from pfeife_accelerate.ir import CostTable, LinkSpec, OpCost, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.ir.program import InputKind
from pfeife_accelerate.schedule import build
from pfeife_accelerate.session.new_plan import worth_copying
from pfeife_accelerate.session.programs import ProgramCache, Run

pytestmark = pytest.mark.local
CPU = torch.device("cpu")
BF16 = ("cpu", torch.bfloat16)


class Net(nn.Module):
    """Two layers; what `make` makes of the input and the buffers is read by both."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("counted", torch.ones(8))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.make(self, x)
        y = torch.tanh(self.first(x)) * both
        return torch.tanh(self.second(y)) * both


def _grown(net: Net, x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(x)
    mask[:, 0] = 1
    return mask * 2


def _counting(net: Net, x: torch.Tensor) -> torch.Tensor:
    both = net.counted * 2
    net.counted.add_(1)
    return both


def _unrecorded(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.first(x) * 2


def _positions(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As rotary tables are made: in full precision, whatever the surroundings."""
    with torch.autocast("cpu", enabled=False):
        angles = torch.arange(x.shape[0], device=x.device)[:, None].float() @ net.table[None]
        return angles.cos() * 3


MAY_BE = {"positions": _positions, "of the input": lambda net, x: x.abs() * net.table}
MUST_NOT_BE = {
    "of a parameter": lambda net, x: (net.first.weight[0] * 2) * x,
    "of a parameter, without a gradient": _unrecorded,
    "of a frozen parameter": lambda net, x: (net.frozen * 2) * 3,
    "random": lambda net, x: F.dropout(x, 0.5) * 2,
    "of a random value": lambda net, x: torch.rand_like(x) * 2,
    "changed in place": _grown,
    "of a changed buffer": _counting,
    "whatever is in memory": lambda net, x: torch.empty(8) * 0,
}


def _call(model: nn.Module, *args: torch.Tensor, autocast: Any = None, **kwargs: Any) -> CapturedCall:
    torch.compiler.reset()
    with torch.autocast(*autocast) if autocast else torch.autocast("cpu", enabled=False):
        return ModelCapture(model, CPU).call(args, kwargs, autocast)


def _run(call: CapturedCall, model: nn.Module, staged: StagedGraph, autocast: Any = None) -> list[torch.Tensor]:
    states = dict(model.named_parameters()) | dict(model.named_buffers())
    values: dict[str, Any] = {}
    arguments = {str(p.index): call.arguments[p.index] for p in call.graph.placeholders}
    source = {
        InputKind.STATE: states, InputKind.SIZE: staged.sizes(call.bindings), InputKind.VALUE: values,
        InputKind.MODEL_INPUT: arguments,
    }  # fmt: skip
    model.zero_grad()
    with torch.autocast(*autocast) if autocast else torch.autocast("cpu", enabled=False):
        for stage in staged.stages:
            given = [source[i.kind][i.name] for i in stage.inputs]
            values.update(zip(stage.outputs, stage.run(*given), strict=True))
    results = [values[name] for name in call.graph.result_names()]
    sum(r.float().square().sum() for r in results).backward()
    return [*(r.detach() for r in results), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _sent(staged: StagedGraph) -> dict[str, int]:
    """Bytes of what crosses stages without a gradient."""
    found = {}
    for name, readers in staged.readers_of.items():
        example = staged.graph.node_of[name].meta["example_value"]
        if readers and not example.requires_grad:
            found[name] = example.element_size() * int(example.numel())
    return found


def _in_between(call: CapturedCall, state: str) -> int:
    """The cut before the operation that reads a parameter."""
    return next(i for i, node in enumerate(call.graph.ops) if state in call.graph.states_of(node))


@pytest.mark.parametrize("autocast", [None, BF16])
@pytest.mark.parametrize("kind", MAY_BE)
def test_what_follows_from_inputs_and_buffers_is_computed_by_each_stage(kind: str, autocast: Any):
    torch.manual_seed(0)
    model = Net(MAY_BE[kind])
    call = _call(model, torch.randn(4, 8), autocast=autocast)
    graph, cut = call.graph, _in_between(call, "second.weight")
    plain = split(graph, (cut,), graph.result_names())
    (name,) = _sent(plain)
    copies = [node.name for node in copyable(graph)]
    assert name in copies
    anew = split(graph, (cut,), graph.result_names(), copied=copies)
    assert not _sent(anew) and set(anew.readers_of) < set(plain.readers_of)
    for found, wanted in zip(_run(call, model, anew, autocast), _run(call, model, plain, autocast), strict=True):
        assert torch.equal(found, wanted)
    late = split(graph, (cut,), graph.result_names(), copied=copies).stages[1].inputs
    assert {i.kind for i in late} > {InputKind.VALUE}, "the input, or the buffer and sizes"


@pytest.mark.parametrize("kind", MUST_NOT_BE)
def test_what_needs_more_than_that_is_sent(kind: str):
    model = Net(MUST_NOT_BE[kind])
    call = _call(model, torch.randn(4, 8))
    cut = _in_between(call, "second.weight")
    crossing = [
        node for node in call.graph.ops[:cut] if any(call.graph.position.get(user, -1) >= cut for user in node.users)
    ]
    assert len(crossing) == 2
    assert not set(crossing) & set(copyable(call.graph))


def test_a_buffer_that_another_graph_changes_is_not_read_anew():
    model = Net(MAY_BE["of the input"])
    graph = _call(model, torch.randn(4, 8)).graph
    assert [node.target for node in copyable(graph, ["table"])] == ["abs"]
    assert [node.target for node in copyable(graph, ["counted"])] == ["abs", operator.mul]


def test_the_stage_that_makes_a_copied_value_for_others_alone_does_not_make_it():
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().cos()
            return self.second(torch.tanh(self.first(x))) * scale

    call = _call(Later(), torch.randn(4, 8))
    cut = _in_between(call, "second.weight")
    names = [node.name for node in copyable(call.graph)]
    first = split(call.graph, (cut,), call.graph.result_names(), copied=names).stages[0].run
    assert "cos" not in first.__self__.code  # type: ignore[attr-defined]


def test_what_is_sooner_computed_than_sent_is_copied():
    def make(net: Net, x: torch.Tensor) -> torch.Tensor:
        dear = torch.stack([net.table] * 8) @ torch.stack([net.table] * 8)
        return dear.sum(0) + x.abs()

    call = _call(Net(make), torch.randn(4, 8))
    ops = to_op_graph(call.graph, call.bindings)
    costs = CostTable(ops=tuple(OpCost(forward_s=1.0 if node.target == "matmul" else 1e-6) for node in ops.nodes))
    link = LinkSpec(latency_s=1e-4, bytes_per_s=1e9)
    copied = [ops.nodes[i].target for i in worth_copying(call.graph, ops, costs, [link])]
    assert "abs" in copied and "stack" in copied
    assert not {"matmul", "sum", "add"} & set(copied), "a dear one is sent, and what is made of it"
    slow = LinkSpec(latency_s=10.0, bytes_per_s=1e9)
    assert {"matmul", "sum"} <= {ops.nodes[i].target for i in worth_copying(call.graph, ops, costs, [slow])}
    assert worth_copying(call.graph, ops, costs, [slow, link]) == worth_copying(call.graph, ops, costs, [link])
    assert worth_copying(call.graph, ops, costs, []) == ()


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, CapturedCall, CapturedCall]:
    """A small Llama with a call in training and, on the same lines, a longer one in evaluation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, use_cache=False
    )
    model = LlamaForCausalLM(config)
    capture = ModelCapture(model, CPU)

    def call(length: int) -> CapturedCall:
        ids = torch.randint(0, 64, (4, length))
        return capture.call((), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril(length - 2)}, None)

    training = call(16)
    model.eval()
    with torch.no_grad():
        return model.train(), training, call(24)


def test_rotary_tables_and_masks_of_a_llama_are_not_sent(llama: Any):
    model, call, other = llama
    graph, cut = call.graph, _in_between(call, "model.layers.2.self_attn.q_proj.weight")
    needed = graph.result_names()
    plain = split(graph, (cut,), needed)
    assert len(_sent(plain)) >= 3, "cos, sin, the mask"
    copies = tuple(node.name for node in copyable(graph))
    anew = split(graph, (cut,), needed, copied=copies)
    assert not _sent(anew)
    for found, wanted in zip(_run(call, model, anew), _run(call, model, plain), strict=True):
        assert torch.equal(found, wanted)

    spec = ScheduleSpec(family=ScheduleFamily.ONE_F_ONE_B, num_ranks=2, num_microbatches=2)
    programs = ProgramCache(build(spec), 0)
    messages = {
        used: programs.program(
            programs.staged(graph, (cut,), needed, used), needed, needed, Run.PLANNED, 2
        ).messages.values()
        for used in ((), copies)
    }
    assert [m.values == m.with_grad for m in messages[copies]] == [True]
    assert [len(m.values) - len(m.with_grad) for m in messages[()]] == [len(_sent(plain))]

    # Of another graph, the same lines.
    cut, copies = _in_between(other, "model.layers.2.self_attn.q_proj.weight"), alike(graph, copies, other.graph)
    needed = other.graph.result_names()
    plain, anew = split(other.graph, (cut,), needed), split(other.graph, (cut,), needed, copied=copies)
    names = [{n for n, readers in staged.readers_of.items() if readers} for staged in (plain, anew)]
    assert names[1] < names[0] and len(names[1]) <= 2, "hidden states"
