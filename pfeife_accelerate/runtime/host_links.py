"""Find the ranks of this host, and connect to them.

Models: ranks that can reach one another by Unix sockets (one kernel, one network namespace, one user); each pair agrees
on whether it is connected, so that both sides use the same way.
Ignores: systems other than Linux, where nobody is connected.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.arena import Arena
from pfeife_accelerate.runtime.host_link import HostLink

__all__ = ["connect_host"]

_START_TIMEOUT_S = 120.0
_CREDENTIALS = struct.Struct("3i")
_RANK = struct.Struct("=I")
_BUFFER_BYTES = 1 << 21
_YES, _NO = b"1", b"0"


def connect_host(store: dist.Store, prefix: str, rank: int, num_ranks: int, timeout: timedelta) -> dict[int, HostLink]:
    """Connections to the ranks on this host, by rank; every rank calls it. A receive waits as long as `timeout`."""
    if not sys.platform.startswith("linux") or num_ranks == 1:
        return {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # An abstract address: no file that a killed process would leave behind.
        address = f"pfeife-{secrets.token_hex(16)}"
        listener.bind("\0" + address)
        listener.listen(num_ranks)
        listener.settimeout(_START_TIMEOUT_S)
        store.set(f"{prefix}/{rank}", json.dumps([_host(), address]))
        places = [json.loads(store.get(f"{prefix}/{peer}")) for peer in range(num_ranks)]
        near = [peer for peer, (host, _) in enumerate(places) if host == _host() and peer != rank]
        try:
            return _connect_all(store, prefix, rank, near, [address for _, address in places], listener, timeout)
        except (OSError, EOFError) as error:
            raise PfeifeError(
                id="PF413", what=f"rank {rank} could not connect to the ranks on its host", why=str(error)
            ) from error


def _connect_all(
    store: dist.Store,
    prefix: str,
    rank: int,
    near: Sequence[int],
    addresses: Sequence[str],
    listener: socket.socket,
    timeout: timedelta,
) -> dict[int, HostLink]:
    """Of two ranks the higher one calls, and says in the store whether that worked."""
    arenas = {peer: Arena() for peer in near}
    called: dict[int, socket.socket] = {}
    for peer in near:
        if peer < rank:
            connection = _call("\0" + addresses[peer])
            store.set(f"{prefix}/{peer}-{rank}", _NO if connection is None else _YES)
            if connection is not None:
                _hand_over(connection, rank, arenas[peer])
                called[peer] = connection
    found: dict[int, HostLink] = {}
    for peer in near:
        if peer > rank and bytes(store.get(f"{prefix}/{rank}-{peer}")) == _YES:
            connection = _accept(listener)
            caller, fd = _receive_arena(connection)
            _hand_over(connection, rank, arenas[caller])
            found[caller] = _link(connection, arenas[caller], fd, timeout)
    for peer, connection in called.items():
        found[peer] = _link(connection, arenas[peer], _receive_arena(connection)[1], timeout)
    for peer in set(near) - set(found):
        arenas[peer].close()
    _close_in_forked_processes(found)
    return found


def _host() -> str:
    """Equal for processes that can reach one another by abstract Unix sockets and trust one another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def _call(address: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_START_TIMEOUT_S)
    try:
        connection.connect(address)
    except OSError:
        # Something keeps these two apart; the process group connects them.
        connection.close()
        return None
    return connection


def _accept(listener: socket.socket) -> socket.socket:
    while True:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
            connection.settimeout(_START_TIMEOUT_S)
            return connection
        connection.close()  # another user's process, which has found the address


def _hand_over(connection: socket.socket, rank: int, arena: Arena) -> None:
    socket.send_fds(connection, [_RANK.pack(rank)], [arena.fd])


def _receive_arena(connection: socket.socket) -> tuple[int, int]:
    """The rank at the other end, and a descriptor of its arena."""
    hello, fds, _, _ = socket.recv_fds(connection, _RANK.size, 1)
    if len(hello) != _RANK.size or len(fds) != 1:
        raise EOFError("the other rank went away")
    return _RANK.unpack(hello)[0], fds[0]


def _link(connection: socket.socket, arena: Arena, fd: int, timeout: timedelta) -> HostLink:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.settimeout(None)
    seconds = timeout.total_seconds()
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return HostLink(connection, arena, fd)


def _close_in_forked_processes(links: Mapping[int, HostLink]) -> None:
    """A forked process (a dataloader's) must not keep connections open that this process's death should close."""
    references = [weakref.ref(link) for link in links.values()]

    def forget() -> None:
        for reference in references:
            link = reference()
            if link is not None:
                link.forget()

    os.register_at_fork(after_in_child=forget)
