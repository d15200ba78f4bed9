"""Operations that draw random numbers, each from a generator state of its own.

Models: what an operation draws follows from the seed it is given and its number among the random operations of the
graph, so neither the cut, nor the order of the stages, nor a repetition changes it; the script's generators stay as
they were. Ignores: operations that are given a generator by the model; what a custom backward draws.
"""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx

from pfeife_accelerate.capture.nodes import target_name, tensors_in
from pfeife_accelerate.ir.seeds import derived_seed

__all__ = ["draws_random", "own_generators", "with_own_numbers"]

_RANDOM_NAMES: Final = re.compile(
    r"dropout|bernoulli|^rand|^normal$|multinomial|normal_|uniform_|exponential_|cauchy_|geometric_|^random_|^poisson$"
    r"|^binomial$|rrelu|gumbel|fractional_max_pool|multi_head_attention_forward"
)
_OPERATORS: Final = "torch._ops."
_OWN_OPERATORS: Final = frozenset({"aten", "prim", "prims", "higher_order", "quantized", "torchvision"})
_DRAWING: Final = threading.Lock()
"""The default generators belong to the process: ranks that are threads take turns."""


def draws_random(node: fx.Node) -> bool:
    """Whether the operation may consume random numbers; a dropout that is switched off does not.

    What an operator of another library does is unknown: it may. A function with its own backward does what its graph
    does.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    if _is_foreign(node) or any(draws_random(inner) for body in _bodies(node) for inner in body.graph.nodes):
        return True
    name = target_name(node)
    if "scaled_dot_product" in name:
        return _argument(node, "dropout_p", 4, default=0.0) != 0.0
    if not _RANDOM_NAMES.search(name):
        return False
    if name == "multi_head_attention_forward":
        return _argument(node, "training", 13, default=True) is not False and _argument(node, "dropout_p", 10) != 0.0
    if "rrelu" in name:
        return _argument(node, "training", 3, default=False) is not False
    if "dropout" in name:
        probability = _argument(node, "p", 1, default=0.5)
        training = _argument(node, "train" if "train" in node.kwargs else "training", 2, default=True)
        return training is not False and probability != 0.0
    return True


def _is_foreign(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return module.startswith(_OPERATORS) and module.removeprefix(_OPERATORS) not in _OWN_OPERATORS


def _bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    """Graphs that the operation is given as arguments."""
    owner = node.graph.owning_module
    for read in node.all_input_nodes:
        if read.op == "get_attr" and owner is not None:
            held = operator.attrgetter(str(read.target))(owner)
            if isinstance(held, fx.GraphModule):
                yield held


def _argument(node: fx.Node, name: str, position: int, default: Any = None) -> Any:
    """An argument given by name or by position; a value known only at run time is a node."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if len(node.args) > position else default


def with_own_numbers(node: fx.Node, number: int) -> Callable[..., Any]:
    """A function `(seed, *args, **kwargs)` that does what the node does, as random operation `number` of its graph."""
    device = next((t.device for t in tensors_in(node.meta.get("example_value"))), torch.device("cpu"))
    target: Callable[..., Any] = (
        _method(node.target) if isinstance(node.target, str) else node.target  # type: ignore[assignment]
    )

    def draw(seed: int, *args: Any, **kwargs: Any) -> Any:
        with _DRAWING, own_generators(derived_seed(int(seed), number), device):
            return target(*args, **kwargs)

    draw.__name__ = draw.__qualname__ = f"{target_name(node).replace('.', '_')}_with_numbers_{number}"
    return draw


def _method(name: str) -> Callable[..., Any]:
    def call(this: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.methodcaller(name, *args, **kwargs)(this)

    return call


@contextmanager
def own_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generators of the CPU and of `device` anew; in the end they are as they were."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
