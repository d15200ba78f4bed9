"""Stages compiled by a Dynamo backend, each by itself, after cutting.

Models: a program for the sizes of a stage's first micro-batch, and one with symbolic sizes for all others (that one
alone where lengths have changed before), in training and in evaluation. What Dynamo must not look into stays as it is,
between compiled parts: random operations, which draw from generator states of their own, and regions that are computed
again, whose insides are compiled by themselves.
Ignores: the backend's own caches; and sizes of one, which Dynamo takes for constants: a program of their own each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from pfeife_accelerate.capture.nodes import source_line
from pfeife_accelerate.compat import compiler_limits, is_compiler_error
from pfeife_accelerate.errors import PfeifeError

__all__ = ["Compilation"]

_VARIANTS: Final = 64
_WHY_LINES: Final = 6


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How stages are compiled: what `torch.compile` is given, but for the sizes."""

    backend: str
    mode: str | None = None
    fullgraph: bool = False
    options: Mapping[str, Any] | None = field(default=None, hash=False)

    def function(
        self, run: Callable[..., Any], nodes: Sequence[fx.Node], what: str, *, seeds: int, any_sizes: bool
    ) -> Callable[..., Any]:
        """`run`, which does what `nodes` do, compiled when it is first called.

        The first `seeds` arguments are seeds. `any_sizes`: not even the first program is to be for its sizes alone.
        """
        first, last = (next(filter(None, map(source_line, some)), None) for some in (nodes, reversed(nodes)))
        where = first if first == last else f"from {first}\nto   {last}"
        return _Compiled(self, run, partial(_refusal, self.backend, what, where), seeds, any_sizes)


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo calls as it is."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class _Compiled:
    """A function in the two programs that Dynamo makes of it: for the sizes seen first, and for any others."""

    def __init__(
        self,
        how: Compilation,
        run: Callable[..., Any],
        refusal: Callable[[Exception], PfeifeError],
        seeds: int,
        any_sizes: bool,
    ) -> None:
        given: dict[str, Any] = {"backend": how.backend, "fullgraph": how.fullgraph}
        if how.options is not None:
            given["options"] = dict(how.options)
        elif how.mode is not None:
            given["mode"] = how.mode
        self._for_first = torch.compile(run, dynamic=any_sizes, **given)
        self._for_any = torch.compile(run, dynamic=True, **given)
        self._refusal = refusal
        self._seeds = seeds
        self._first: dict[bool, tuple[Any, ...]] = {}
        self._known: set[tuple[Any, ...]] = set()

    def __call__(self, *args: Any) -> Any:
        if self._seeds:  # Dynamo may take a number for a constant, and this one is another for each micro-batch
            seeds = (torch.as_tensor(seed, device="cpu") for seed in args[: self._seeds])
            args = (*seeds, *args[self._seeds :])
        training = torch.is_grad_enabled()
        key = (training, *map(_form, args[self._seeds :]))
        program = self._for_first if self._first.setdefault(training, key) == key else self._for_any
        if key in self._known:
            return program(*args)
        try:
            with compiler_limits(_VARIANTS):
                results = program(*args)
        except Exception as error:
            if not is_compiler_error(error):
                raise
            raise self._refusal(error) from error
        self._known.add(key)
        return results


def _form(value: Any) -> Any:
    """What a program may depend on; parameters keep theirs."""
    if isinstance(value, torch.nn.Parameter):
        return value.requires_grad
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.requires_grad
    return value


def _refusal(backend: str, what: str, where: str | None, error: Exception) -> PfeifeError:
    cause = error.__cause__ or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return PfeifeError(
        id="PF173",
        what=f"{what} cannot be compiled by {backend!r}",
        where=where,
        why="\n".join([f"{type(cause).__name__}:", *lines[:_WHY_LINES]]),
        hints=("pfeife_config: compile: none", "another backend"),
    )
