"""Memory that a rank lends to another one on its host, in blocks: an anonymous file that both have mapped.

Models: blocks by first fit at the lowest offset, so that the file stays as small as what is under way at once. A block
costs one copy in and one copy out. The file is mapped in windows, each when it is first used.
Ignores: when a block may be used again; its reader says so. Linux only (`os.memfd_create`); the kernel frees the file
with the last process that holds it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import torch

__all__ = ["Arena", "SharedFile", "memory_of"]

_ALIGNMENT = 4096  # a page: a block that is written does not touch the pages of another
_WINDOW_BYTES = 1 << 25  # address space; memory is what has been written


class Arena:
    """Blocks for one reader. Not to be used by two threads at once."""

    def __init__(self) -> None:
        self._file = SharedFile(os.memfd_create("pfeife"))
        self._used: list[tuple[int, int]] = []
        """(offset, bytes) of blocks under way, by offset."""

    @property
    def fd(self) -> int:
        """The file's descriptor, for the reader."""
        return self._file.fd

    def put(self, data: torch.Tensor) -> int:
        """Copy contiguous CPU bytes into a free block; gives its offset."""
        size = -(-data.numel() // _ALIGNMENT) * _ALIGNMENT
        offset, position = 0, 0
        for start, used in self._used:
            if start - offset >= size:
                break
            offset, position = start + used, position + 1
        self._used.insert(position, (offset, size))
        self._file.write(offset, data)
        return offset

    def give_back(self, offset: int) -> None:
        """The reader has taken what was in the block there."""
        self._used = [block for block in self._used if block[0] != offset]

    @property
    def bytes_in_use(self) -> int:
        """Bytes of blocks that have not been given back."""
        return sum(size for _, size in self._used)

    def close(self) -> None:
        """Drop this process's handle."""
        self._file.close()


class SharedFile:
    """A file in memory, of which this process reads and writes vectors of bytes; it grows as it is written."""

    def __init__(self, fd: int) -> None:
        """Take over a descriptor."""
        self.fd = fd
        self._windows: dict[int, torch.Tensor] = {}

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copy contiguous CPU bytes to that place."""
        for window, part in self._parts(offset, data, grows=True):
            window.copy_(part)

    def read(self, offset: int, data: torch.Tensor) -> None:
        """Fill contiguous CPU bytes from there.

        Raises: EOFError where the file ends before.
        """
        for window, part in self._parts(offset, data, grows=False):
            part.copy_(window)

    def close(self) -> None:
        """Drop the descriptor."""
        os.close(self.fd)

    def _parts(self, offset: int, data: torch.Tensor, *, grows: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the file's windows, each with the piece of `data` that belongs there."""
        done = 0
        while done < data.numel():
            index, start = divmod(offset + done, _WINDOW_BYTES)
            count = min(data.numel() - done, _WINDOW_BYTES - start)
            window = self._windows.get(index)
            if window is None:
                window = self._windows[index] = self._map(index, grows=grows)
            yield window[start : start + count], data[done : done + count]
            done += count

    def _map(self, index: int, *, grows: bool) -> torch.Tensor:
        end = (index + 1) * _WINDOW_BYTES
        if os.fstat(self.fd).st_size < end:
            if not grows:
                raise EOFError("the other rank's shared memory ends before the message")
            os.ftruncate(self.fd, end)
        return torch.frombuffer(mmap.mmap(self.fd, _WINDOW_BYTES, offset=index * _WINDOW_BYTES), dtype=torch.uint8)


def memory_of(data: torch.Tensor) -> memoryview:
    """The memory of a vector of bytes on the CPU."""
    return memoryview(data.numpy())
