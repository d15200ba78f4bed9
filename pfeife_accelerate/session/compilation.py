"""Whether stages are compiled, and by what: the option `compile`, or else Accelerate's `dynamo_config`.

Ignores: regional compilation, since a stage is a region, and `dynamic`, since sizes that have changed once are symbols.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from pfeife_accelerate.capture.compiled import Compilation
from pfeife_accelerate.config import SECTION, PfeifePlugin
from pfeife_accelerate.errors import PfeifeError, did_you_mean

__all__ = ["compilation_of"]

_NONE: Final = ("none", "no")


def compilation_of(plugin: PfeifePlugin, dynamo: Any) -> Compilation | None:
    """How stages are to be compiled; `dynamo` is Accelerate's `TorchDynamoPlugin`.

    Raises: PfeifeError PF171 for a backend that this torch does not know, PF172 for one that uses CUDA graphs.
    """
    if plugin.compile is not None:
        where, backend, found = f"{SECTION}: compile", plugin.compile.lower(), {}
    else:
        where, backend = "dynamo_config: dynamo_backend", str(dynamo.backend.value).lower()
        found = {"mode": dynamo.mode, "fullgraph": bool(dynamo.fullgraph), "options": dynamo.options}
        if dynamo.disable:
            return None
    if backend in _NONE:
        return None
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        near = did_you_mean(backend, known)
        listed = "known: none, " + ", ".join(torch.compiler.list_backends())
        raise PfeifeError(
            id="PF171",
            what=f"{backend!r} is no Dynamo backend of this torch ({torch.__version__})",
            where=where,
            hints=(listed,) if near is None else (f"did you mean {near!r}?", listed),
        )
    compilation = Compilation(backend=backend, **found)
    _refuse_cuda_graphs(compilation, where)
    return compilation


def _refuse_cuda_graphs(how: Compilation, where: str) -> None:
    if how.backend == "cudagraphs":
        what = "the backend 'cudagraphs'"
    elif how.mode in ("reduce-overhead", "max-autotune"):
        what = f"the mode {how.mode!r}"
    elif (how.options or {}).get("triton.cudagraphs"):
        what = "the option 'triton.cudagraphs'"
    else:
        return
    raise PfeifeError(
        id="PF172",
        what=f"stages cannot be compiled with {what}",
        where=where,
        why="it runs CUDA graphs, whose results the next run overwrites, and several micro-batches are under way",
        hints=(f"{SECTION}: compile: inductor",),
    )
