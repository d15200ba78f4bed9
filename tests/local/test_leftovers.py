"""What a capture leaves behind in memory: no more than is needed to run it, and to say where an operation stands."""

from __future__ import annotations

import gc
import linecache
import weakref

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture import backend
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.nodes import source_line
from pfeife_accelerate.runtime.process_memory import give_back_freed

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))  # the line


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class RowsOfTwo(nn.Module):
    """Reshapes one argument by the rows of another: it divides only where both are known to be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.layer(y.flatten().reshape(x.shape[0], -1))


def test_nodes_keep_their_value_and_one_frame_and_the_graph_no_sources():
    graph = ModelCapture(Outer(), CPU).call((torch.randn(8, 4),), {}, None).graph
    assert not hasattr(graph.gm, "_param_name_to_source")
    assert not any(hasattr(node, "_dynamo_source") for node in graph.gm.graph.nodes)
    lines = [source_line(node) for node in graph.ops]
    assert len(lines) >= 6
    for node, line in zip(graph.ops, lines, strict=True):
        assert set(node.meta) <= {"example_value", "stack_trace", "custom"}, node.meta.keys()
        assert node.meta["stack_trace"].count("File ") == 1
        assert line is not None and "in forward: return torch.tanh(self.layer(x))  # the line" in line


@pytest.fixture
def pieces(monkeypatch) -> list[weakref.ref[backend.Piece]]:
    """All that are captured, in order, as far as they live."""
    found: list[weakref.ref[backend.Piece]] = []
    made = backend.Piece.__init__

    def noted(self: backend.Piece, gm: torch.fx.GraphModule) -> None:
        made(self, gm)
        found.append(weakref.ref(self))

    monkeypatch.setattr(backend.Piece, "__init__", noted)
    return found


def test_a_capture_that_is_superseded_is_let_go(pieces):
    capture = ModelCapture(RowsOfTwo(), CPU)
    call = capture.call((torch.randn(8, 4), torch.randn(8, 2, 2)), {}, None)
    assert call.graph.refusal is None
    number = len(pieces)
    assert number == 2, "one capture as the arguments are, one with equal rows"
    gc.collect()
    assert [piece() is not None for piece in pieces] == [False, True]
    again = capture.call((torch.randn(8, 4), torch.randn(8, 2, 2)), {}, None)
    assert again.graph is call.graph and len(pieces) == number


def test_a_capture_with_equal_rows_that_does_not_help_is_let_go(pieces):
    class Mixing(RowsOfTwo):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) * self.layer(x.mean(0))

    capture = ModelCapture(Mixing(), CPU)
    given = torch.randn(8, 4), torch.randn(8, 2, 2)
    call = capture.call(given, {}, None)
    assert call.graph.refusal is not None and len(pieces) == 2
    gc.collect()
    assert [piece() is not None for piece in pieces] == [True, False]
    assert capture.call(given, {}, None).graph is call.graph and len(pieces) == 2


def test_lines_of_files_are_forgotten_and_those_without_a_file_are_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("one\ntwo\n")
    assert linecache.getline(str(path), 2) == "two\n"
    linecache.cache["<made up>"] = (4, None, ["made\n"], "<made up>")
    try:
        give_back_freed()
        assert str(path) not in linecache.cache
        assert linecache.getline("<made up>", 1) == "made\n"
        assert linecache.getline(str(path), 1) == "one\n"
    finally:
        del linecache.cache["<made up>"]
