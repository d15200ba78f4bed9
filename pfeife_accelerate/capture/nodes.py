"""Small questions about single fx nodes: what they read, mutate, and where in the model's source they stand."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pfeife_accelerate.compat import AUTOCAST_ENTER, AUTOCAST_EXIT, LOG_API_USAGE

_INPLACE_OPERATORS = frozenset(
    {
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.iand,
        operator.ior,
        operator.ixor,
        operator.ipow,
        operator.ilshift,
        operator.irshift,
        operator.setitem,
    }
)
#: Called so because Python has these names for itself.
_KEYWORDS = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})
#: What Dynamo notes of a node for its own messages and for compilers.
_FOR_REPORTS = frozenset({"nn_module_stack", "source_fn_stack", "original_aten", "from_node", "stack_trace"})
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<code>[^\n]*)')


def inputs_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes whose values this node reads, in argument order, each once."""
    return tuple(node.all_input_nodes)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a node's example value, which may be a tensor, a structure of tensors, or anything else."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def target_name(node: fx.Node) -> str:
    """The operation's name without its module, e.g. `linear`, `view`, `add`."""
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def mutates(node: fx.Node) -> fx.Node | None:
    """The node whose value this operation changes in place, or None."""
    name = target_name(node)
    inplace = (
        node.target in _INPLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__") and node.target not in _KEYWORDS)
        or node.kwargs.get("inplace") is True
        or _positional_inplace(node)
    )
    if isinstance(node.kwargs.get("out"), fx.Node):
        return node.kwargs["out"]  # type: ignore[return-value]
    if inplace and node.args and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


def _positional_inplace(node: fx.Node) -> bool:
    """Activations of `torch.nn.functional` take `inplace` as their last positional argument."""
    module = getattr(node.target, "__module__", "") or ""
    return (
        module == "torch.nn.functional"
        and bool(node.args)
        and node.args[-1] is True
        and "dropout" not in str(node.target)
    )


def is_training_batch_norm(node: fx.Node) -> bool:
    """Whether the node normalises by the statistics of the batch it sees, which will be a micro-batch."""
    if target_name(node) != "batch_norm":
        return False
    training = node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
    return training is True


def autocast_step(node: fx.Node) -> int:
    """+1 for a node that enters an autocast region, -1 for one that leaves it, else 0."""
    return {AUTOCAST_ENTER: 1, AUTOCAST_EXIT: -1}.get(node.target, 0)  # type: ignore[call-overload, no-any-return]


def transformed(graph: fx.Graph) -> frozenset[fx.Node]:
    """What runs under `torch.vmap`, `torch.func.grad` or their kin, with the nodes that begin and end that."""
    found: set[fx.Node] = set()
    depth = 0
    for node in graph.nodes:
        name = target_name(node)
        step = int(name.endswith("_increment_nesting")) - int(name.endswith("_decrement_nesting"))
        if depth or step:
            found.add(node)
        depth += step
    return frozenset(found)


def is_noise(node: fx.Node) -> bool:
    """Bookkeeping calls without effect on values."""
    return node.target is LOG_API_USAGE


def source_line(node: fx.Node) -> str | None:
    """`file:line in function: code` of the model's source line that made the node, if known."""
    frame = _last_frame(node.meta.get("stack_trace") or "")
    return None if frame is None else f"{frame['file']}:{frame['line']} in {frame['name']}: {frame['code'].strip()}"


def keep_source_lines(graph: fx.Graph) -> None:
    """Of what Dynamo notes of nodes, keep their values and one frame of their stacks, which are most of a graph."""
    shortened: dict[str, str] = {}
    for node in graph.nodes:
        trace = node.meta.get("stack_trace")
        node.meta = {key: value for key, value in node.meta.items() if key not in _FOR_REPORTS}
        if trace:
            if trace not in shortened:
                frame = _last_frame(trace)
                shortened[trace] = "" if frame is None else frame.group()
            node.meta["stack_trace"] = shortened[trace]


def _last_frame(trace: str) -> re.Match[str] | None:
    frames = [f for f in _FRAME.finditer(trace) if not f["file"].endswith("pfeife_accelerate/capture/eager_ops.py")]
    return frames[-1] if frames else None
