"""Autocast's state, which graphs that Dynamo captured change by plain calls: a failure in between leaves it changed.

Models: torch 2.10 - 2.14: `torch.autocast_increment_nesting` and `_decrement_nesting`, which `torch.autocast` uses and
which are not documented. Ignores: autocast of other device types than the one given and the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["autocast_as_it_was"]


@contextmanager
def autocast_as_it_was(device_type: str) -> Iterator[None]:
    """Whatever happens inside, autocast is afterwards as it was before, and forgets casts that were made inside."""
    kinds = dict.fromkeys((device_type, "cpu"))
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    caches, depth = torch.is_autocast_cache_enabled(), _depth()
    try:
        yield
    finally:
        if _depth() > depth:
            while _depth() > depth:
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(caches)
        for kind, is_enabled, dtype in before:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)


def _depth() -> int:
    """How many autocasts are entered."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
