"""Logging with the rank in front of every message: `[pfeife rank 1/2] ...`.

Models: standard loggers below `pfeife_accelerate`; the script's own logging configuration stays in charge.
Ignores: gathering messages over ranks.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

__all__ = ["RankLogger", "get_logger", "set_rank", "set_verbose", "warn_once"]

_ROOT = "pfeife_accelerate"

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 cannot subscript it
    _Adapter = logging.LoggerAdapter


class _ProcessState:
    """What logging knows of this process: the one mutable global of the package, because a process has one rank."""

    def __init__(self) -> None:
        self.prefix = "[pfeife]"
        self.warned: set[tuple[str, str]] = set()


_STATE = _ProcessState()


class RankLogger(_Adapter):
    """A logger that puts the rank in front of each message."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix the message; called by the standard library for every record."""
        return f"{_STATE.prefix} {msg}", kwargs


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr only while the script has configured no logging of its own: nothing is printed twice."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def get_logger(name: str) -> RankLogger:
    """The logger of a module; pass `__name__`."""
    full = name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}"
    return RankLogger(logging.getLogger(full), {})


def set_rank(rank: int, world: int) -> None:
    """Say which process of how many this is; before it, messages start with `[pfeife]`."""
    _STATE.prefix = f"[pfeife rank {rank}/{world}]"


def warn_once(logger: RankLogger, key: str, message: str) -> None:
    """Warn the first time `key` is seen by this logger in this process."""
    mark = (logger.logger.name, key)
    if mark not in _STATE.warned:
        _STATE.warned.add(mark)
        logger.warning("%s", message)


def set_verbose(level: int) -> None:
    """Show warnings (0), decisions such as the chosen plan (1), or everything (2)."""
    root = logging.getLogger(_ROOT)
    root.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(max(level, 0), 2)])
    if not any(isinstance(handler, _FallbackHandler) for handler in root.handlers):
        handler = _FallbackHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)
