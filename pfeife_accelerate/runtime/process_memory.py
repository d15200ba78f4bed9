"""Memory that the process has freed and its C library still holds.

Models: glibc, which keeps what was allocated in small pieces. Ignores: other C libraries, where nothing is done.
"""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["give_back_freed"]


def give_back_freed() -> None:
    """Return freed memory to the system: once, after capturing and measuring, which need much of it for a moment."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        # Another C library, which has no such function.
        return
