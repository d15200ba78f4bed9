"""Buffers that a forward pass changes, where the pass is run once more: it must find them as it did the first time.

A second run (a guess that was wrong, a second backward) repeats what the first did; the buffers keep what they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from pfeife_accelerate.session.call import Call


@contextmanager
def as_the_first_time(call: Call, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Around a forward of the call; `buffers` are those of this rank's stages."""
    if not call.graph.changes_buffers:
        yield
        return
    now = _copies(buffers)
    if call.buffers_before is None:
        call.buffers_before = now
        yield
        return
    _write(buffers, call.buffers_before)
    try:
        yield
    finally:
        _write(buffers, now)


@contextmanager
def unchanged(call: Call, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Around a forward of the call that is not to count."""
    before = _copies(buffers) if call.graph.changes_buffers else None
    try:
        yield
    finally:
        if before is not None:
            _write(buffers, before)


def _copies(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in buffers.items()}


def _write(buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])
