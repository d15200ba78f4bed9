"""Structures that a model returns: tuples, dictionaries, dataclasses with tensors in them.

Models: what pytree knows, and dataclasses, to a certain depth. Ignores: attributes of any other object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pfeife_accelerate.compat import pytree

MAX_DEPTH = 6


def tensors_of(structure: Any) -> Iterator[torch.Tensor]:
    """Each tensor in a structure, once."""
    found: list[torch.Tensor] = []

    def note(item: torch.Tensor) -> torch.Tensor:
        found.append(item)
        return item

    map_tensors(note, structure)
    yield from {id(item): item for item in found}.values()


def map_tensors(replace: Callable[[Any], Any], structure: Any, depth: int = MAX_DEPTH) -> Any:
    """Apply to every tensor in tuples, dicts, dataclasses and whatever pytree knows, keeping classes."""
    if isinstance(structure, torch.Tensor):
        return replace(structure)
    if depth == 0 or structure is None or isinstance(structure, str | bytes | int | float | bool):
        return structure
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type) and not isinstance(structure, dict):
        fields = {f.name: vars(structure)[f.name] for f in dataclasses.fields(structure)}
        changed = {name: map_tensors(replace, value, depth - 1) for name, value in fields.items()}
        return dataclasses.replace(structure, **changed)
    children, spec = pytree.tree_flatten(structure, is_leaf=lambda x: x is not structure)
    if len(children) == 1 and children[0] is structure:
        return structure
    return pytree.tree_unflatten([map_tensors(replace, child, depth - 1) for child in children], spec)
