"""Whole-batch values of one call that this rank holds for the scripts to read.

Models: values kept as their micro-batches until somebody reads them. Ignores: which values are worth keeping.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

__all__ = ["CallValues"]


class CallValues:
    """Values by name. A reader on another rank comes by a thread of its own."""

    def __init__(self) -> None:
        self._whole: dict[str, torch.Tensor] = {}
        self._in_parts: dict[str, Callable[[], torch.Tensor]] = {}
        self._lock = threading.Lock()

    def keep_parts(self, name: str, join: Callable[[], torch.Tensor]) -> None:
        """A value that `join` puts together; its parts are given up then."""
        with self._lock:
            self._whole.pop(name, None)
            self._in_parts[name] = join

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        with self._lock:
            self._in_parts.pop(name, None)
            self._whole[name] = value

    def update(self, values: Mapping[str, torch.Tensor]) -> None:
        """Hold these."""
        for name, value in values.items():
            self[name] = value

    def __contains__(self, name: str) -> bool:
        with self._lock:  # while a reader joins the parts, the value is in neither place
            return name in self._whole or name in self._in_parts

    def get(self, name: str) -> torch.Tensor | None:
        """The whole value; None if it is not held here."""
        with self._lock:
            join = self._in_parts.pop(name, None)
            if join is not None:
                with torch.inference_mode(False), torch.no_grad():
                    self._whole[name] = join()
            return self._whole.get(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value
