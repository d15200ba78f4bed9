"""Calls of a model under capture: the graph, this call's arguments, and the structure of what the model returns.

The model's own `forward` is compiled with a backend that computes nothing, on fake parameters; see `backend` and
`fakes`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn

from pfeife_accelerate.capture.backend import CallRecorder
from pfeife_accelerate.capture.deferred import DeferredTensor, resolve
from pfeife_accelerate.capture.fakes import FakeState
from pfeife_accelerate.capture.graph import CapturedGraph, PlaceholderKind, bind_symbols
from pfeife_accelerate.compat import dynamo_limits, graph_break_reasons, mark_batch_dynamic, pytree
from pfeife_accelerate.errors import PfeifeError

_MAX_CAPTURES = 64
_MAX_DEPTH = 6


@dataclasses.dataclass(frozen=True, eq=False)
class InputLink:
    """An argument that a gradient must flow into: what the script passed, and the leaf tensor that the stages read."""

    index: int
    source: torch.Tensor
    leaf: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedCall:
    """One call: its graph, the graph's arguments, the values of its size symbols, and the returned structure."""

    graph: CapturedGraph
    arguments: tuple[Any, ...]
    bindings: Mapping[Any, int]
    structure: Any
    fakes: Mapping[int, int]
    links: tuple[InputLink, ...] = ()

    def outputs_with(self, value_of: Callable[[int], Any], *, half_to_float: object = None) -> Any:
        """The returned structure with `value_of(i)` in place of graph output i."""

        def replace(item: Any) -> Any:
            index = self.fakes.get(id(item))
            if index is None:
                return item
            value = value_of(index)
            return value.float() if half_to_float and value.dtype in (torch.float16, torch.bfloat16) else value

        return _map_tensors(replace, self.structure, _MAX_DEPTH)


class ModelCapture:
    """Captures calls of one model; equal calls cost Dynamo's guards alone."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.original_forward: Callable[..., Any] = module.forward
        self._prepare()

    def _prepare(self) -> None:
        self._fakes = FakeState(self.module, self.device)
        self._recorder = CallRecorder(self._fakes.name_of, self._fakes.mode)
        forward = self.original_forward

        def captured_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        self._compiled = torch.compile(captured_forward, backend=self._recorder)

    def states(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by canonical name."""
        return self._fakes.real_states()

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: tuple[str, torch.dtype] | None
    ) -> CapturedCall:
        """Capture one call.

        Raises: PfeifeError PF510 if the model cannot be captured as one graph.
        """
        if not self._fakes.matches():
            self._prepare()
        inputs = _Inputs()
        args, kwargs = pytree.tree_map(inputs.plain, (args, kwargs))
        rows = _batch_size([t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
        recorder = self._recorder
        recorder.calls.clear()
        recorder.batch_size = rows
        mode = torch.autocast(*autocast) if autocast else nullcontext()
        with dynamo_limits(_MAX_CAPTURES), self._fakes.in_place(), mode:
            try:
                structure = self._compiled(*args, **kwargs)
            except Exception as error:
                if not recorder.calls:
                    raise
                # After a first graph, the model's own code has run on values that were never computed.
                raise _not_one_graph(self.module, len(recorder.calls) + 1) from error
        if len(recorder.calls) != 1:
            raise _not_one_graph(self.module, len(recorder.calls))
        (made,) = recorder.calls
        recorder.calls.clear()
        return CapturedCall(
            graph=made.graph,
            arguments=made.args,
            bindings=bind_symbols(made.graph, made.args),
            structure=structure,
            fakes={id(fake): i for i, fake in enumerate(made.outputs)},
            links=inputs.links(made.args),
        )


def replay_tail(
    graph: CapturedGraph, arguments: tuple[Any, ...], bindings: Mapping[Any, int], value_of: Callable[[str], Any]
) -> dict[fx.Node, Any]:
    """Values of the graph's tail: its operations applied to `value_of(name)` and this call's arguments.

    What the tail reads of the inputs alone (its prologue) is computed here too, on the whole batch.
    """
    values: dict[fx.Node, Any] = {}

    def operand(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        placeholder = graph.placeholder_of.get(node)
        if placeholder is not None and placeholder.kind is PlaceholderKind.INPUT:
            return arguments[placeholder.index]
        if node.op == "get_attr":
            return graph.constant(node)
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            return graph.concrete(example, bindings)
        values[node] = value_of(node.name)
        return values[node]

    for node in graph.gm.graph.nodes:
        if node not in graph.tail and node not in graph.prologue:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        if node.op == "call_method":
            values[node] = operator.methodcaller(node.target, *args[1:], **kwargs)(args[0])
        else:
            values[node] = node.target(*args, **kwargs)
    return values


class _Inputs:
    """Arguments of one call as real tensors: those that a gradient must flow into become leaves of their own."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def plain(self, item: Any) -> Any:
        """What to call the model with in place of an argument."""
        if not isinstance(item, torch.Tensor):
            return item
        value = resolve(item) if isinstance(item, DeferredTensor) else item
        if not (torch.is_grad_enabled() and item.requires_grad):
            return value
        if id(item) not in self._leaves:
            self._leaves[id(item)] = item, value.detach().requires_grad_()
        return self._leaves[id(item)][1]

    def links(self, arguments: tuple[Any, ...]) -> tuple[InputLink, ...]:
        """Which of a graph's arguments they became."""
        sources = {id(leaf): source for source, leaf in self._leaves.values()}
        return tuple(InputLink(i, sources[id(a)], a) for i, a in enumerate(arguments) if id(a) in sources)


def _batch_size(tensors: list[torch.Tensor]) -> int:
    """The size that most arguments have in dimension 0; the first argument's in doubt."""
    sizes = [t.shape[0] for t in tensors if t.dim()]
    if not sizes:
        return 1
    rows = max(Counter(sizes).items(), key=lambda item: (item[1], -sizes.index(item[0])))[0]
    if rows > 1:
        for tensor in tensors:
            if tensor.dim() and tensor.shape[0] == rows:
                mark_batch_dynamic(tensor)
    return rows


def _map_tensors(replace: Callable[[Any], Any], structure: Any, depth: int) -> Any:
    """Apply to every tensor in tuples, dicts, dataclasses and whatever pytree knows, keeping classes."""
    if isinstance(structure, torch.Tensor):
        return replace(structure)
    if depth == 0 or structure is None or isinstance(structure, str | bytes | int | float | bool):
        return structure
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type) and not isinstance(structure, dict):
        fields = {f.name: vars(structure)[f.name] for f in dataclasses.fields(structure)}
        changed = {name: _map_tensors(replace, value, depth - 1) for name, value in fields.items()}
        return dataclasses.replace(structure, **changed)
    children, spec = pytree.tree_flatten(structure, is_leaf=lambda x: x is not structure)
    if len(children) == 1 and children[0] is structure:
        return structure
    return pytree.tree_unflatten([_map_tensors(replace, child, depth - 1) for child in children], spec)


def _not_one_graph(module: nn.Module, number: int) -> PfeifeError:
    reasons = graph_break_reasons()
    recurrent = sorted({type(m).__name__ for m in module.modules() if isinstance(m, nn.RNNBase)})
    if recurrent:
        return PfeifeError(
            id="PF510",
            what=f"{type(module).__name__} holds recurrent layers ({', '.join(recurrent)}), which are not captured",
            where="; ".join(reasons[:3]) or None,
            why="they keep a list of their weights beside their parameters, so these cannot be placed on one rank",
            hints=("train the recurrent part without a pipeline",),
        )
    return PfeifeError(
        id="PF510",
        what=f"{type(module).__name__} cannot be captured as one graph ({number} pieces)",
        where="; ".join(reasons[:3]) or None,
        why="its forward does something that TorchDynamo cannot trace, such as a branch on a tensor's value",
        hints=("rewrite the named line without reading tensor values",),
    )
