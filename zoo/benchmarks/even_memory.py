"""The same kind of memory for all who are measured: what is in scattered pages is put together, or kept from them.

Models: Linux hands out first what lies between others, in single pages. A process that gets those computes more slowly
than one that starts later, by up to twice, for as long as it lives: contestants would differ by the order of their
start. Ignores: systems where memory cannot be compacted (that needs root); there, holding what is scattered has to do.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["even_memory", "scattered_bytes"]

_PAGE = 4096
_LARGE = 9  # a large page is 2**9 pages
_MOST_BYTES = 5 << 30
_COMPACT, _FREE = Path("/proc/sys/vm/compact_memory"), Path("/proc/buddyinfo")


@contextmanager
def even_memory() -> Iterator[None]:
    """Compact memory, and hold as much as is still free in pieces smaller than a large page."""
    try:
        _COMPACT.write_text("1")
    except OSError as error:
        print(f"memory is not compacted: {error}", file=sys.stderr, flush=True)
    size = min(scattered_bytes(_FREE.read_text()), _MOST_BYTES) if _FREE.exists() else 0
    with mmap.mmap(-1, max(size, _PAGE)) as memory:
        for start in range(0, size, _PAGE):
            memory[start] = 1
        yield


def scattered_bytes(free: str) -> int:
    """Bytes in pieces smaller than a large page, of a table with a column for each power of two of pages."""
    counts = [[int(count) for count in line.split()[4 : 4 + _LARGE]] for line in free.splitlines()]
    return sum(count * _PAGE << order for row in counts for order, count in enumerate(row))
