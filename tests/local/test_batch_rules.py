"""Which arguments carry the batch, by rule, by declaration, and by what the capture shows; and which rows are mixed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.errors import PfeifeError

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


class Plain(nn.Module):
    """Uses all kinds of arguments, each if it is there."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, labels=None, weights=None, scale=None, conditions=None, factor=1.0, extra=None):
        y = self.layer(x)
        if conditions is not None:
            y = y + conditions["inner"][0][0] + conditions["table"].mean(0)
        if scale is not None:
            y = y * scale
        if extra is not None:
            y = y * extra.sum()
        y = y * factor
        return y if labels is None else F.cross_entropy(y, labels, weight=weights)


def batched(call):
    """For each input of the graph, by size, the dimension that carries the batch."""
    graph = call.graph
    return {
        tuple(call.arguments[p.index].shape): graph.batch_dim(p.example)
        for p in graph.placeholders
        if p.kind.value == "input"
    }


def capture(model, *args, dims=(), **kwargs):
    return ModelCapture(model, CPU, tuple(dims)).call(args, kwargs, None)


def test_class_weights_as_long_as_the_batch_are_no_batch():
    labels, weights = torch.randint(0, 8, (8,)), torch.rand(8)
    call = capture(Plain(), torch.randn(8, 8), labels=labels, weights=weights)
    found = {id(t): None for t in (labels, weights)}
    assert len(found) == 2
    dims = [call.graph.batch_dim(p.example) for p in call.graph.placeholders if p.kind.value == "input"]
    assert sorted(dims, key=str) == [0, 0, None]
    assert call.graph.refusal is None and call.doubts == ()


def test_scalars_none_and_nested_structures():
    conditions = {"inner": [(torch.randn(6, 8), None)], "table": torch.randn(5, 8)}
    call = capture(Plain(), torch.randn(6, 8), scale=torch.tensor(2.0), conditions=conditions, factor=3)
    assert batched(call) == {(6, 8): 0, (): None, (5, 8): None}
    assert call.graph.refusal is None and call.doubts == ()


def test_an_argument_that_has_differed_from_the_batch_never_carries_it():
    model = ModelCapture(Plain(), CPU)
    conditions = {"inner": [(torch.randn(6, 8),)], "table": torch.randn(5, 8)}
    model.call((torch.randn(6, 8),), {"conditions": conditions}, None)
    conditions["inner"] = [(torch.randn(5, 8),)]
    call = model.call((torch.randn(5, 8),), {"conditions": conditions}, None)
    sizes = [(p.index, call.graph.batch_dim(p.example)) for p in call.graph.placeholders if p.kind.value == "input"]
    tables = [i for i, _ in sizes if call.arguments[i].data_ptr() == conditions["table"].data_ptr()]
    assert dict(sizes)[tables[0]] is None
    assert sorted(dim for i, dim in sizes if i != tables[0]) == [0, 0]


def test_a_tie_is_said():
    call = capture(Plain(), torch.randn(6, 8), extra=torch.randn(7, 2))
    assert batched(call) == {(6, 8): 0, (7, 2): None}
    assert "it is assumed that dimension 0 of 'x' (size 6) is the batch and that 'extra' carries none" in call.doubts[0]
    assert "set the option batch_dims" in call.doubts[0]


def test_an_argument_that_nothing_ties_to_the_batch_is_said_and_can_be_declared():
    x, extra = torch.randn(6, 8), torch.randn(6)
    call = capture(Plain(), x, extra=extra)
    # Its sum is over the batch if it carries one, and that is mixing: then nothing is divided, and nothing is wrong.
    declared = capture(Plain(), x, extra=extra, dims=[("extra", None)])
    assert call.doubts or call.graph.refusal
    assert batched(declared) == {(6, 8): 0, (6,): None}
    assert declared.graph.refusal is None and declared.doubts == ()


class TwoResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, times):
        return self.layer(x), times * 2


def test_a_vector_as_long_as_the_batch_that_nothing_ties_to_it_is_said():
    call = capture(TwoResults(), torch.randn(6, 8), torch.randn(6))
    assert call.graph.refusal is None
    (doubt,) = call.doubts
    assert doubt.startswith("it is assumed that 'times' (shape (6,)) has a value for each row of the batch")
    assert "set the option batch_dims" in doubt


class SequenceFirst(nn.Module):
    """A transformer layer on (length, batch, width)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False)

    def forward(self, src, mask=None):
        return self.layer(src)


def test_sequence_first_is_divided_along_its_declared_dimension():
    x = torch.randn(7, 4, 8)
    call = capture(SequenceFirst(), x, dims=[("src", 1)])
    assert batched(call) == {(7, 4, 8): 1}
    assert call.graph.refusal is None
    assert call.bindings[next(iter(call.graph.batch_symbols))] == 4
    by_position = capture(SequenceFirst(), x, dims=[("0", 1)])
    assert batched(by_position) == {(7, 4, 8): 1}


def test_sequence_first_undeclared_is_seen_by_its_attention_and_not_divided():
    call = capture(SequenceFirst(), torch.randn(7, 4, 8))
    assert call.graph.refusal is not None
    assert "mixes the rows of the batch" in call.graph.refusal


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(8, 8), nn.Linear(8, 8), mix

    def forward(self, x):
        return self.last(self.mix(self.first(x)))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: torch.softmax(h, 0),
        lambda h: h.cumsum(0),
        lambda h: h.flip(0),
        lambda h: torch.softmax(h @ h.T, -1) @ h,
        lambda h: h.flip(1, 0),
        lambda h: torch.roll(h, 1, 0),
        lambda h: torch.roll(h, 1),
        lambda h: torch.fft.fft(h, dim=0).real,
        lambda h: torch.fft.fft2(h).real,
        lambda h: torch.fft.fftn(h).real,
        lambda h: torch.fft.fftshift(h),
        lambda h: torch.msort(h),
        lambda h: torch.flipud(h),
        lambda h: torch.tril(h),
        lambda h: F.softmin(h, 0),
        lambda h: F.gumbel_softmax(h, 1.0, False, 1e-10, 0),
        lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
        lambda h: F.conv1d(h.T[None], torch.ones(8, 8, 1))[0].T,
    ],
)
def test_operations_that_mix_rows_and_keep_their_number_are_seen(mix):
    assert "mixes the rows of the batch" in (capture(Mixing(mix), torch.randn(6, 8)).graph.refusal or "")


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: torch.softmax(h, -1),
        lambda h: h.cumsum(1).flip(-1),
        lambda h: torch.fft.fft(torch.fft.fftshift(h, 1), dim=1).real,
        lambda h: torch.fft.irfft(torch.fft.rfft(h)),
        lambda h: torch.fft.fftn(torch.fft.fft2(h[:, :, None] * h[:, None]), dim=(1, 2)).real.sum(-1),
        lambda h: torch.tril(h[:, None] * h[:, :, None]).sum(1),
        lambda h: F.softmin(F.gumbel_softmax(h), -1),
        lambda h: torch.cat([h[:, 4:], h[:, :4]], dim=1),
        lambda h: F.layer_norm(h, (8,)),
    ],
)
def test_operations_along_other_dimensions_are_not(mix):
    assert capture(Mixing(mix), torch.randn(6, 8)).graph.refusal is None


def test_declarations_that_do_not_fit_are_refused():
    x = torch.randn(6, 8)
    with pytest.raises(PfeifeError, match=r"PF532 batch_dims names 'y'(.|\n)*arguments: x"):
        capture(Mixing(lambda h: h), x, dims=[("y", 0)])
    with pytest.raises(PfeifeError, match=r"PF532 batch_dims names 'scr'(.|\n)*did you mean 'src'"):
        capture(SequenceFirst(), torch.randn(7, 4, 8), dims=[("scr", 1)])
    with pytest.raises(PfeifeError, match="PF533 batch_dims says dimension 2 of x, which has 2 dimensions"):
        capture(Mixing(lambda h: h), x, dims=[("x", 2)])
    with pytest.raises(PfeifeError, match="PF533 the declared batch dimensions have different sizes"):
        capture(Plain(), x, extra=torch.randn(7, 2), dims=[("x", 0), ("extra", 0)])


def test_the_scripts_own_tensors_are_left_unmarked():
    x = torch.randn(6, 8)
    capture(Plain(), x)
    assert not any(name.startswith("_dynamo") for name in vars(x))


class SizesOfOthers(nn.Module):
    """Reshapes `ids` by the rows of `x`, as SDXL's network does, and counts its calls."""

    def __init__(self, breaks=False):
        super().__init__()
        self.layer, self.breaks, self.calls = nn.Linear(8, 8), breaks, 0

    def forward(self, x, ids, times=None, table=None, labels=None, weights=None):
        self.calls += 1
        y = self.layer(x)
        z = self.layer(ids.flatten().reshape(x.shape[0], -1))
        if self.breaks:
            torch._dynamo.graph_break()
        y = y * z
        if table is not None:
            y = self.layer(y * table.mean(0))
        out = y if labels is None else F.cross_entropy(y, labels, weight=weights)
        return out if times is None else (out, times * 2)


@pytest.mark.parametrize("breaks", [False, True])
def test_rows_of_one_argument_by_those_of_another_are_no_mixing(breaks):
    model = SizesOfOthers(breaks)
    captured = ModelCapture(model, CPU)
    for number, rows in enumerate((6, 6, 5), 1):
        call = captured.call((torch.randn(rows, 8),), {"ids": torch.randn(rows, 4, 2)}, None)
        assert call.graph.refusal is None and call.doubts == ()
        assert set(call.bindings.values()) == {rows}
        assert batched(call) == {(rows, 8): 0, (rows, 4, 2): 0}
        assert model.calls == number


def test_a_model_is_asked_once_whether_equal_rows_help():
    model = SizesOfOthers()
    captured = ModelCapture(model, CPU)
    x = torch.randn(8, 8)
    for number in (1, 2):
        call = captured.call((x,), {"ids": torch.randn(8, 8), "table": torch.randn(8, 8)}, None)
        assert "mixes the rows" in call.graph.refusal
        assert model.calls == number


def test_what_is_in_doubt_stays_so_where_others_are_tied():
    labels, weights, ids = torch.randint(0, 8, (8,)), torch.rand(8), torch.randn(8, 4, 2)
    call = capture(SizesOfOthers(), torch.randn(8, 8), ids, labels=labels, weights=weights)
    dims = [call.graph.batch_dim(p.example) for p in call.graph.placeholders if p.kind.value == "input"]
    assert call.graph.refusal is None and sorted(dims, key=str) == [0, 0, 0, None]
    call = capture(SizesOfOthers(), torch.randn(6, 8), torch.randn(6, 4, 2), times=torch.randn(6))
    assert call.graph.refusal is None
    (doubt,) = call.doubts
    assert doubt.startswith("it is assumed that 'times' (shape (6,)) has a value for each row of the batch")
