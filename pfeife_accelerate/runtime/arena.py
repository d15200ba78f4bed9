"""Memory that a rank lends to another one on its host, in blocks: an anonymous file, read and written at offsets.

Models: blocks by first fit at the lowest offset, so that the file stays as small as what is under way at once. Neither
side maps the file: a block costs one copy in and one copy out, and no memory of either process.
Ignores: when a block may be used again; its reader says so. Linux only (`os.memfd_create`); the kernel frees the file
with the last process that holds it.
"""

from __future__ import annotations

import os

import torch

__all__ = ["Arena", "memory_of", "read_into"]

_ALIGNMENT = 4096  # a page: a block that is written does not touch the pages of another


class Arena:
    """Blocks for one reader. Not to be used by two threads at once."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pfeife")
        self._used: list[tuple[int, int]] = []
        """(offset, bytes) of blocks under way, by offset."""

    def put(self, data: torch.Tensor) -> int:
        """Copy contiguous CPU bytes into a free block; gives its offset."""
        size = -(-data.numel() // _ALIGNMENT) * _ALIGNMENT
        offset, position = 0, 0
        for start, used in self._used:
            if start - offset >= size:
                break
            offset, position = start + used, position + 1
        self._used.insert(position, (offset, size))
        memory, written = memory_of(data), 0
        while written < len(memory):
            written += os.pwrite(self.fd, memory[written:], offset + written)
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
        os.close(self.fd)


def read_into(fd: int, offset: int, data: torch.Tensor) -> None:
    """Fill contiguous CPU bytes from another rank's arena."""
    memory, done = memory_of(data), 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:
            raise EOFError("the other rank's shared memory ends before the message")
        done += count


def memory_of(data: torch.Tensor) -> memoryview:
    """The memory of a vector of bytes on the CPU."""
    return memoryview(data.numpy())
