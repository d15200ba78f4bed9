"""The Dynamo side of a capture: collect the graphs of one call, compute nothing.

Key components: `CallRecorder`, the backend given to `torch.compile`; `eager_backend`, registered in the entry-point
group `torch_dynamo_backends` under the name `pfeife`, which runs what it is given and helps to debug a capture:
`torch.compile(model, backend="pfeife")`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.capture.graph import CapturedGraph, bind_symbols


def eager_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run the captured graph as it is (Dynamo's contract: takes a graph, returns a callable)."""
    return gm.forward


@dataclass(frozen=True, kw_only=True)
class GraphCall:
    """One captured graph with the arguments of the present call and the fake tensors returned for its outputs."""

    graph: CapturedGraph
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]


class CallRecorder:
    """Backend whose compiled graphs note that they were called, and return fake outputs without computing."""

    def __init__(self, name_of: dict[int, str], fake_mode: Any) -> None:
        self.name_of = name_of
        self.fake_mode = fake_mode
        self.calls: list[GraphCall] = []
        self.batch_size = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's contract: called once for each new graph."""
        graphs: list[CapturedGraph] = []

        def run(*args: Any) -> list[Any]:
            if not graphs:  # the first call follows compilation directly and shows which tensors the arguments are
                graphs.append(CapturedGraph.build(gm, args, self.name_of, self.batch_size))
            graph = graphs[0]
            outputs = tuple(self._fake_output(graph, value, args) for value in graph.output_examples)
            self.calls.append(GraphCall(graph=graph, args=args, outputs=outputs))
            return list(outputs)

        return run

    def _fake_output(self, graph: CapturedGraph, example: Any, args: tuple[Any, ...]) -> Any:
        if not isinstance(example, torch.Tensor):
            return graph.concrete(example, bind_symbols(graph, args))
        shape = graph.concrete(tuple(example.shape), bind_symbols(graph, args))
        with self.fake_mode, torch.no_grad():
            fake = torch.empty(shape, dtype=example.dtype, device=example.device)
        return fake.requires_grad_(example.requires_grad)
