"""What Dynamo keeps of a capture for its own purposes, and how it is made to let go of it.

Models: memory alone. Nothing here changes what is captured. Names that torch does not promise, with their versions.
"""

from __future__ import annotations

from types import CodeType

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["forget_fakes", "forget_tracing", "forget_variants_of"]


def forget_tracing(gm: torch.fx.GraphModule) -> None:
    """Drop what Dynamo notes of where each parameter and placeholder comes from, for AOTAutograd alone and large, and
    what is known of operations on fakes of these sizes, which is not asked again after a capture.

    torch 2.5 - 2.14: attributes of the module that the backend is given and of its placeholders;
    `ShapeEnv.fake_tensor_cache`.
    """
    vars(gm).pop("_param_name_to_source", None)
    for node in gm.graph.nodes:
        if hasattr(node, "_dynamo_source"):
            del node._dynamo_source
        example = node.meta.get("example_value")
        if isinstance(example, FakeTensor) and example.fake_mode.shape_env is not None:
            example.fake_mode.shape_env.fake_tensor_cache.clear()


def forget_variants_of(code: CodeType) -> None:
    """Drop all that has been captured of a function that nobody calls any more: its graphs, guards and fakes.

    torch 2.1 - 2.14: `reset_code`, as `torch.compiler.reset` does for every function. Dynamo maps the code it made to
    the code it was made of, which holds the former: by itself none of them ever goes. Guards are emptied first, since
    finalizers of the classes and modules that they look at hold them.
    """
    guards = [entry.guard_manager for entry in _debug_get_cache_entry_list(code)]
    reset_code(code)
    for manager in guards:
        vars(manager).update(dict.fromkeys(vars(manager)))


def forget_fakes() -> None:
    """Drop what is known of operations on fake tensors: it keeps the sizes of all captures alive.

    torch 2.1 - 2.14: `FakeTensorMode.cache_clear`. What is captured later finds it out again.
    """
    FakeTensorMode.cache_clear()
