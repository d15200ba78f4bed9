"""The Dynamo side of a capture: collect the graphs of one call, compute nothing.

Key components: `CallRecorder`, the backend given to `torch.compile`; `eager_backend`, registered in the entry-point
group `torch_dynamo_backends` under the name `pfeife`, which runs what it is given and helps to debug a capture:
`torch.compile(model, backend="pfeife")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.eager_ops import OperationRecorder
from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.nodes import keep_source_lines, mutates
from pfeife_accelerate.capture.regions import inline_regions
from pfeife_accelerate.capture.sizes import bind, concrete
from pfeife_accelerate.compat import FakeTensorMode, mark_dynamic
from pfeife_accelerate.compat_dynamo import forget_tracing

_VARIANTS = 8


def eager_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run the captured graph as it is (Dynamo's contract: takes a graph, returns a callable)."""
    return gm.forward


class Piece:
    """One graph that Dynamo made: all of the model, or what lies between two graph breaks."""

    def __init__(self, gm: fx.GraphModule) -> None:
        inline_regions(gm)
        forget_tracing(gm)
        keep_source_lines(gm.graph)
        self.gm = gm
        self.placeholders = tuple(node for node in gm.graph.nodes if node.op == "placeholder")
        self.examples = tuple(node.meta.get("example_value") for node in self.placeholders)
        self.results: tuple[Any, ...] = tuple(next(n for n in gm.graph.nodes if n.op == "output").args[0])
        self.result_examples = tuple(
            value.meta.get("example_value") if isinstance(value, fx.Node) else value for value in self.results
        )
        self._graphs: dict[tuple[int | None, ...], CapturedGraph] = {}

    def bindings(self, args: Sequence[Any]) -> dict[Any, int]:
        """Values of this piece's size symbols in a call with these arguments."""
        return bind(zip(self.examples, args, strict=True))

    def whole(self, args: tuple[Any, ...], name_of: Mapping[int, str], batch_dims: Mapping[int, int]) -> CapturedGraph:
        """The piece as the graph of the whole model; read anew for arguments that carry the batch elsewhere."""
        key = tuple(batch_dims.get(id(arg)) for arg in args)
        if key not in self._graphs:
            if len(self._graphs) >= _VARIANTS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = CapturedGraph.build(self.gm, args, name_of, batch_dims)
        return self._graphs[key]


@dataclass(frozen=True, kw_only=True)
class PieceCall:
    """One captured piece with the arguments of the present call and the fake tensors returned for its results."""

    piece: Piece
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    ops_before: int
    """How many eager operations had been noted when it was called."""

    def returns_changed(self, output: Any, argument: torch.Tensor) -> bool:
        """Whether an output is the argument itself after changes in place (`self.steps += 1`)."""
        index = next((i for i, own in enumerate(self.outputs) if own is output), None)
        node = None if index is None else self.piece.results[index]
        while isinstance(node, fx.Node) and node.op != "placeholder":
            node = mutates(node)
        return node in self.piece.placeholders and self.args[self.piece.placeholders.index(node)] is argument


class CallRecorder:
    """Backend whose compiled graphs note that they were called, and return fake outputs without computing."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        self.calls: list[PieceCall] = []
        self.operations: OperationRecorder | None = None
        """Notes what runs outside the pieces, if that is wanted."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's contract: called once for each new graph."""
        piece = Piece(gm)

        def run(*args: Any) -> list[Any]:
            bindings = piece.bindings(args)
            with self.operations.paused() if self.operations is not None else nullcontext():
                outputs = tuple(self._fake_output(value, bindings) for value in piece.result_examples)
            done = len(self.operations.ops) if self.operations is not None else 0
            self.calls.append(PieceCall(piece=piece, args=args, outputs=outputs, ops_before=done))
            return list(outputs)

        return run

    def _fake_output(self, example: Any, bindings: Mapping[Any, int]) -> Any:
        if not isinstance(example, torch.Tensor):
            return concrete(example, bindings)
        shape = concrete(tuple(example.shape), bindings)
        with self.fake_mode, torch.no_grad():
            fake = torch.empty(shape, dtype=example.dtype, device=example.device)
        # A later piece must not take for a constant what this one left open.
        mark_dynamic(fake, [dim for dim, size in enumerate(example.shape) if isinstance(size, torch.SymInt)])
        return fake.requires_grad_(example.requires_grad)
