"""Captured operations made ready for measuring."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.backend import CallRecorder
from pfeife_accelerate.capture.fakes import FakeState
from pfeife_accelerate.capture.graph import bind_symbols
from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.nodes import target_name
from pfeife_accelerate.compat import dynamo_limits, mark_batch_dynamic
from pfeife_accelerate.ir.costs import OperandRole

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


def capture(model, batch, rows, micro_rows, autocast=None):
    """(graph, measurable operations) of a model called with a dictionary of tensors."""
    torch.compiler.reset()  # another model of this class makes sizes symbolic that are not for this one alone
    state = FakeState(model, CPU)
    recorder = CallRecorder(state.mode)
    call = torch.compile(type(model).forward.__get__(model), backend=recorder)
    for tensor in batch.values():
        mark_batch_dynamic(tensor)
    with dynamo_limits(32), state.in_place(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(autocast)):
        call(**batch)
    made = recorder.calls[0]
    batch_dims = {id(tensor): 0 for tensor in batch.values() if tensor.shape[0] == rows}
    graph, args = made.piece.whole(made.args, state.name_of, batch_dims), made.args
    bindings = bind_symbols(graph, args)
    bindings |= {symbol: micro_rows for symbol in graph.batch_symbols}
    return graph, measurable_ops(graph, bindings, CPU, autocast)


def named(ops, target):
    return [op for op in ops if op is not None and op.target == target]


def run(op):
    prepared = op.prepare()
    with op.context():
        return prepared, prepared.run()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)

    def forward(self, x):
        h = self.inner(x)
        h = h.view(h.shape[0], 2, 8).transpose(1, 2)
        h.relu_()
        first, second = h.chunk(2, dim=1)
        h = torch.cat([first, second], dim=1)
        with torch.no_grad():
            scale = h.abs().mean()
        h = (h * h / (scale + 1)).reshape(h.shape[0], 16)
        return x + self.outer(h)


class Blocks(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Edits(nn.Module):
    """Writes into tensors, by index and by method, and looks up by integers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, ids, mask):
        x = self.table(ids)
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y.masked_fill_(mask[..., None], 0.0)
        y += self.seen
        return y.square()


@pytest.fixture(scope="module")
def blocks():
    return capture(Blocks(2), {"x": torch.randn(6, 8)}, rows=6, micro_rows=3)


@pytest.fixture(scope="module")
def edits():
    batch = {"ids": torch.randint(0, 5, (6, 4)), "mask": torch.rand(6, 4) > 0.5}
    return capture(Edits(), batch, rows=6, micro_rows=2)


def test_operations_run_at_the_size_of_a_microbatch(blocks):
    graph, ops = blocks
    assert len(ops) == len(graph.ops)
    for op in filter(None, ops):
        _, result = run(op)
        results = result if isinstance(result, tuple) else (result,)
        assert tuple(tuple(t.shape) for t in results) == tuple(o.spec.shape for o in op.writes), op.key
        assert tuple(t.requires_grad for t in results) == tuple(o.spec.requires_grad for o in op.writes), op.key
    assert named(ops, "linear")[0].reads[0].spec.shape == (3, 8)


def test_equal_layers_have_equal_keys():
    batch = {"x": torch.randn(6, 8, requires_grad=True)}
    distinct = []
    for num_blocks in (1, 4):
        _, ops = capture(Blocks(num_blocks), batch, rows=6, micro_rows=3)
        distinct.append({op.key for op in ops if op is not None})
    assert distinct[0] == distinct[1]


def test_keys_tell_apart_what_costs_differently(blocks):
    _, ops = blocks
    products = {op.key for op in named(ops, "linear")}
    assert len(products) == 3  # inner of the first block needs no gradient of its input
    graph, _ = blocks
    other = measurable_ops(graph, {symbol: 2 for symbol in graph.batch_symbols}, CPU)
    half = measurable_ops(graph, {symbol: 3 for symbol in graph.batch_symbols}, CPU, ("cpu", torch.bfloat16))
    assert not products & {op.key for op in named(other, "linear")}
    assert not products & {op.key for op in named(half, "linear")}


def test_picking_from_a_tuple_and_switching_modes_cost_nothing(blocks):
    graph, ops = blocks
    free = {target_name(node) for node, op in zip(graph.ops, ops, strict=True) if op is None}
    assert "getitem" in free and free <= {"getitem", "_set_grad_enabled", "size", "getattr"}
    assert named(ops, "chunk") and named(ops, "cat")


def test_strides_and_repeated_inputs_are_kept(blocks):
    _, ops = blocks
    squared = named(ops, "mul")[0]
    assert len(squared.reads) == 1
    prepared, _ = run(named(ops, "relu_")[0])
    assert tuple(prepared.reads[0].stride()) == (16, 1, 8)


def test_inplace_operations_get_what_may_be_changed(edits):
    _, ops = edits
    for target in ("setitem", "masked_fill_", "iadd"):
        (op,) = named(ops, target)
        prepared, result = run(op)
        assert op.is_inplace and result.shape == (2, 4, 8)
        assert all(result is not tensor for tensor in prepared.reads)


def test_inputs_are_valid_and_states_are_flagged(edits):
    _, ops = edits
    (lookup,) = named(ops, "embedding")
    assert [operand.role for operand in lookup.reads] == [OperandRole.INPUT, OperandRole.STATE]
    prepared, result = run(lookup)
    assert prepared.reads[1].is_leaf and prepared.reads[1].requires_grad and result.requires_grad
    buffer = named(ops, "iadd")[0].reads[1]
    assert buffer.role is OperandRole.STATE and not buffer.spec.requires_grad


def test_views_share_the_storage_of_what_they_view(blocks):
    _, ops = blocks
    (view,) = named(ops, "view")[:1]
    assert view.reads[0].storage == view.writes[0].storage
    assert view.reads[0].storage_bytes == 3 * 16 * 4


def test_autocast_is_followed():
    _, ops = capture(Blocks(1), {"x": torch.randn(6, 8)}, 6, 3, ("cpu", torch.bfloat16))
    product = named(ops, "linear")[0]
    _, result = run(product)
    assert result.dtype is torch.bfloat16 and product.writes[0].spec.dtype == "bfloat16"


class Regions(nn.Module):
    """Enters and leaves autocast itself."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.mT
            with torch.autocast("cpu", enabled=False):
                z = x @ x.mT
        return y.float() + z @ x @ x.mT


def test_autocast_inside_the_graph_is_followed():
    graph, ops = capture(Regions(), {"x": torch.randn(6, 8, 8)}, 6, 3)
    assert sum(op is None for op in ops) == 4
    products = [op for op in named(ops, "matmul") if op.reads[0].spec == op.reads[1].spec][:2]
    assert [run(op)[1].dtype for op in products] == [torch.bfloat16, torch.float32]
    assert [op.writes[0].spec.dtype for op in named(ops, "matmul")] == ["bfloat16", "float32", "float32", "float32"]
    assert len(ops) == len(graph.ops)
