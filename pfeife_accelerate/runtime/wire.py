"""One TCP connection between two ranks, carrying JSON and raw tensor bytes; nothing on it is ever unpickled.

Models: messages in order, both directions, an authenticated other end, a host that vanishes without closing.
Ignores: what the messages mean, and encryption: the network between the ranks is trusted with the data.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from threading import Lock
from typing import Any, TypeAlias

import torch

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
# As the socket module has it: (host, port), or four items for IPv6.
Address: TypeAlias = "tuple[Any, ...]"

# A host that loses power closes nothing: these make the kernel give up on it within ten seconds. Linux names.
_SOCKET_OPTIONS = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 8000))

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Wire:
    """An open, authenticated connection. One thread reads; any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = Lock()
        # A second handle on the same socket: for options, for tensors, and to shut it down while a thread reads.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SOCKET_OPTIONS:
            option = vars(socket).get(name)
            if option is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    @classmethod
    def connect(cls, address: Address, secret: bytes) -> Wire:
        """Open a connection to a listening rank; both ends prove that they know the secret."""
        return cls(Client(address, family=family_of(address), authkey=secret))

    @classmethod
    def accept(cls, connection: Connection, secret: bytes) -> Wire | None:
        """Take over an incoming connection, or refuse one that does not know the secret."""
        try:
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
        except (AuthenticationError, OSError, EOFError):
            connection.close()
            return None
        return cls(connection)

    def send(self, message: dict[str, Json]) -> None:
        """Send one message."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send what `encode` made, for a message to several ranks."""
        with self._sending:
            self._connection.send_bytes(data)

    def try_send(self, data: bytes, timeout_s: float) -> None:
        """Send a short message if that can be done in time; drop it where the other end is stuck or gone."""
        if not self._sending.acquire(timeout=timeout_s):
            return
        try:
            _, writable, _ = select.select([], [self._socket], [], timeout_s)
            if writable:
                self._connection.send_bytes(data)
        except (OSError, ValueError):
            # Gone or closed; whoever reads from it takes note.
            return
        finally:
            self._sending.release()

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message, decoded JSON.

        `TimeoutError` when none comes in time, `EOFError` or `OSError` when the other end is gone.
        """
        self._await_data(timeout_s)
        message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return message

    def send_tensors(self, header: dict[str, Json], tensors: list[torch.Tensor]) -> None:
        """Send contiguous CPU tensors behind a header that says what they are."""
        specs: list[Json] = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        with self._sending:
            self._connection.send_bytes(encode({**header, "tensors": specs}))
            for tensor in tensors:
                self._socket.sendall(_memory_of(tensor))

    def receive_tensors(self, header: dict[str, Any], timeout_s: float | None = None) -> list[torch.Tensor]:
        """The tensors that follow a header from `send_tensors`."""
        tensors = []
        for dtype, shape in header["tensors"]:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype])
            # Straight into the tensor's memory; the connection above reads no byte more than its messages have.
            memory = _memory_of(tensor)
            while len(memory) > 0:
                self._await_data(timeout_s)
                count = self._socket.recv_into(memory)
                if count == 0:
                    raise EOFError
                memory = memory[count:]
            tensors.append(tensor)
        return tensors

    def shutdown(self) -> None:
        """End the connection now: both ends' reads and writes return with an error."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end was faster.
            return

    def close(self) -> None:
        """Free the connection, by the thread that reads from it."""
        self.shutdown()
        # A sender that is under way must not write into whatever gets the same descriptor next.
        with self._sending:
            self.forget()

    def forget(self) -> None:
        """Drop this process's handles without ending the connection: another process shares it."""
        self._connection.close()
        self._socket.close()

    def _await_data(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not self._connection.poll(timeout_s):
            raise TimeoutError


def encode(message: dict[str, Json]) -> bytes:
    """A message as bytes."""
    return json.dumps(message, separators=(",", ":")).encode()


def family_of(address: Address) -> str:
    """The socket family of an address, as multiprocessing names it."""
    return "AF_INET6" if len(address) == 4 else "AF_INET"


def local_address(master_addr: str) -> Address:
    """A free port on the interface by which this host reaches the master: the other ranks reach it there."""
    family, _, _, _, target = min(socket.getaddrinfo(master_addr, 1, type=socket.SOCK_DGRAM), key=lambda info: info[0])
    address = _source_address(family, target)
    # A host's own name often resolves to loopback on that host alone; the other hosts use its outward interface.
    if address[0].startswith("127.") and not (master_addr.startswith("127.") or master_addr == "localhost"):
        # Without a way out of this host, all ranks are here.
        with contextlib.suppress(OSError):
            address = _source_address(socket.AF_INET, ("192.0.2.1", 1))
    return (address[0], 0, *address[2:])


def _source_address(family: int, target: Address) -> Address:
    # Connecting a datagram socket sends nothing; it makes the kernel choose the interface.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() > 0 else memoryview(b"")
