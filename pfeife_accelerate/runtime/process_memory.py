"""Memory that the process does not need: what it has freed and its C library still holds, and lines of source files.

Models: glibc, which keeps what was allocated in small pieces. Ignores: other C libraries, where nothing is done.
"""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys

__all__ = ["give_back_freed"]


def give_back_freed() -> None:
    """Return freed memory to the system: once, after capturing and measuring, which need much of it for a moment."""
    _forget_source_lines()
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        # Another C library, which has no such function.
        return


def _forget_source_lines() -> None:
    """Of files, which Dynamo reads by the hundred; who needs a line reads it again. Code without a file stays known."""
    entries = list(linecache.cache.items())
    for name in [name for name, entry in entries if len(entry) == 4 and entry[1] is not None]:
        linecache.cache.pop(name, None)
