"""Stages of a captured graph on made-up tensors, to be timed as a step runs them.

Models: the very program that a rank would run for these operations, with parameters, values and gradients of the right
shapes, and parameters of a size at which numbers neither grow nor vanish from layer to layer: what is subnormal takes
processors many times as long. Ignores: all else about the values, which parameters are tied, and what a plan may want
of a stage (compiled, recomputed, weight gradients put off).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind
from pfeife_accelerate.capture.measurable import make_up
from pfeife_accelerate.capture.nodes import tensors_in
from pfeife_accelerate.capture.split import split
from pfeife_accelerate.errors import assert_never
from pfeife_accelerate.ir.costs import TrialStage
from pfeife_accelerate.ir.program import InputKind, StageInput, StageProgram

__all__ = ["trial_stages"]


def trial_stages(
    graph: CapturedGraph,
    stages: Sequence[slice],
    bindings: Mapping[Any, int],
    device: torch.device,
    autocast: tuple[str, torch.dtype] | None = None,
) -> list[Callable[[], TrialStage]]:
    """What makes each stage: operations between positions where the graph may be cut, for a micro-batch of these sizes.

    `autocast` is (device type, element type) of the region in which the model is called.
    Making one raises NotMeasurable where an argument cannot be made up.
    """
    starts = sorted({0, *(bound for s in stages for bound in (s.start, s.stop) if bound < len(graph.ops))})
    programs = split(graph, starts[1:], graph.result_names()).stages
    return [partial(_made_up, graph, programs[starts.index(s.start)], bindings, device, autocast) for s in stages]


def _made_up(
    graph: CapturedGraph,
    program: StageProgram,
    bindings: Mapping[Any, int],
    device: torch.device,
    autocast: tuple[str, torch.dtype] | None,
) -> TrialStage:
    examples = {(p.kind, p.state_name or str(p.index)): p.example for p in graph.placeholders}
    made = {i: _argument(graph, i, examples, bindings, device) for i in program.inputs}
    values = (argument for i, argument in made.items() if i.kind in (InputKind.VALUE, InputKind.MODEL_INPUT))
    mode = nullcontext if autocast is None else partial(torch.autocast, autocast[0], dtype=autocast[1])
    return TrialStage(
        forward=partial(_forward, program.run, [made[i] for i in program.inputs], mode),
        values=tuple(tensor for value in values for tensor in tensors_in(value) if tensor.requires_grad),
    )


def _forward(
    run: Callable[..., tuple[Any, ...]], arguments: list[Any], mode: Callable[[], AbstractContextManager[Any]]
) -> list[torch.Tensor]:
    with mode():
        return [tensor for tensor in tensors_in(run(*arguments)) if tensor.requires_grad]


def _argument(
    graph: CapturedGraph,
    wanted: StageInput,
    examples: Mapping[tuple[PlaceholderKind, str], Any],
    bindings: Mapping[Any, int],
    device: torch.device,
) -> Any:
    match wanted.kind:
        case InputKind.STATE:
            return _tame(make_up(graph, examples[PlaceholderKind.STATE, wanted.name], bindings, device))
        case InputKind.MODEL_INPUT:
            return make_up(graph, examples[PlaceholderKind.INPUT, wanted.name], bindings, device)
        case InputKind.VALUE | InputKind.SIZE:
            return make_up(graph, graph.node_of[wanted.name].meta["example_value"], bindings, device)
        case InputKind.SEED:
            return 0
        case InputKind.LATER:
            return None
        case _:
            assert_never(wanted.kind)


@torch.no_grad()
def _tame(state: torch.Tensor) -> torch.Tensor:
    """Ones for what scales, shifts or is a variance; matrices and kernels as initialisations have them."""
    if not state.is_floating_point():
        return state
    return state.fill_(1.0) if state.dim() < 2 else state.div_(math.sqrt(max(1, state[0].numel())))
