"""Threads that serve others and keep no process alive.

Models: an interpreter that ends while others still ask: from Python 3.12 on it refuses new threads then, and whom they
would have served is ending too. Ignores: what the threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["start_daemon"]


def start_daemon(name: str, target: Callable[..., Any], *arguments: Any) -> None:
    """Start a thread called `name`, unless the interpreter is ending."""
    try:
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
