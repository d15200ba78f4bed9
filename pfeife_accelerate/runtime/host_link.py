"""A connection between two ranks on one host: short messages in order, large ones through shared memory.

Models: datagrams over a Unix socket (a microsecond each, no thread on either side), a send that never waits for the
reader: what the socket does not take at once, a thread sends. The end of the other process ends the connection.
Ignores: what messages are for; the transport matches them by tag. Linux only.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from pfeife_accelerate.runtime.arena import Arena, memory_of, read_into

__all__ = ["HostLink", "Incoming"]

_INLINE_BYTES = 4 * 1024  # beyond this, a block is cheaper than the room in the socket
_HEADER = struct.Struct("=BQQQQ")
_INLINE, _BLOCK, _FREE = range(3)
_LONGEST = _HEADER.size + _INLINE_BYTES


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message that has arrived: its bytes, or where they lie in the other rank's arena.

    `sent_ns` is when it was complete, by the clock that all processes of the host share (`time.perf_counter_ns`).
    """

    tag: int
    num_bytes: int
    data: bytes | None
    offset: int
    sent_ns: int


class HostLink:
    """One end. One thread uses it; `shutdown` may come from any."""

    def __init__(self, connection: socket.socket, arena: Arena, fd: int) -> None:
        """Take over a connected socket, the own arena, and the descriptor of the other rank's."""
        self._socket = connection
        self._arena = arena
        self._fd = fd
        self._late: deque[bytes] = deque()
        self._has_late = threading.Condition()
        self._sender: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, data: torch.Tensor, tag: int) -> None:
        """Send contiguous CPU bytes; they are copied, and may be changed when this returns.

        Raises: OSError if the other rank is gone.
        """
        size = data.numel()
        if size <= _INLINE_BYTES:
            self._post(_HEADER.pack(_INLINE, tag, 0, size, perf_counter_ns()) + memory_of(data).tobytes())
            return
        offset = self._arena.put(data)
        self._post(_HEADER.pack(_BLOCK, tag, offset, size, perf_counter_ns()))

    def receive(self) -> Incoming | None:
        """Block for the next datagram; None if it was not a message but news of a block that is free again.

        Raises: EOFError or OSError if the other rank is gone, TimeoutError after the socket's time limit.
        """
        try:
            data = self._socket.recv(_LONGEST)
        except BlockingIOError as error:
            raise TimeoutError(str(error)) from error
        return self._understand(data)

    def poll(self) -> Incoming | None:
        """The next message that is there already, or None."""
        while True:
            try:
                data = self._socket.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            message = self._understand(data)
            if message is not None:
                return message

    def take(self, message: Incoming, data: torch.Tensor) -> None:
        """Copy a message of that many bytes into contiguous CPU memory; the sender may use its block again."""
        if message.data is not None:
            memory_of(data)[:] = message.data
            return
        read_into(self._fd, message.offset, data)
        self._post(_HEADER.pack(_FREE, 0, message.offset, 0, 0))

    def check(self) -> None:
        """Raises: OSError if a message could not be sent any more."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Wait until the socket has taken all own messages."""
        with self._has_late:
            self._has_late.wait_for(lambda: not self._late or self._error is not None)
        self.check()

    def shutdown(self) -> None:
        """End the connection now: both ends' reads and writes return with an error."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end was faster.
            return

    def forget(self) -> None:
        """Drop this process's handles without ending the connection: another process has it."""
        self._socket.close()
        self._arena.close()
        os.close(self._fd)

    def _understand(self, data: bytes) -> Incoming | None:
        if not data:
            raise EOFError("the other rank has closed the connection")
        kind, tag, offset, size, sent_ns = _HEADER.unpack_from(data)
        if kind == _FREE:
            self._arena.give_back(offset)
            return None
        return Incoming(tag, size, data[_HEADER.size :] if kind == _INLINE else None, offset, sent_ns)

    def _post(self, datagram: bytes) -> None:
        self.check()
        if not self._late:
            try:
                self._socket.send(datagram, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass  # the other rank has not read for long
            else:
                return
        with self._has_late:
            self._late.append(datagram)
            self._has_late.notify_all()
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_late, name="pfeife-late-messages", daemon=True)
            self._sender.start()

    def _send_late(self) -> None:
        while True:
            with self._has_late:
                self._has_late.wait_for(lambda: bool(self._late))
            try:
                self._socket.send(self._late[0])
            except OSError as error:
                self._error = error
            with self._has_late:
                # Only now: as long as it is in the queue, later ones line up behind it.
                self._late.popleft()
                self._has_late.notify_all()
            if self._error is not None:
                return
