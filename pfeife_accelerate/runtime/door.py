"""Where other ranks come in: a listening socket, and the check that who comes knows the pipeline's secret.

Models: callers that say nothing or the wrong thing, without keeping others out.
Ignores: what callers want; each is handed on with the hello it gave.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from typing import Any

from pfeife_accelerate.runtime.daemon import start_daemon
from pfeife_accelerate.runtime.wire import Address, Wire, family_of

_HELLO_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 0.5


class Door:
    """Listens in one thread; each caller gets a thread that runs `welcome(wire, hello)`."""

    def __init__(
        self, host: Address, secret: bytes, backlog: int, welcome: Callable[[Wire, dict[str, Any]], None]
    ) -> None:
        self._secret = secret
        self._welcome = welcome
        self._is_closed = False
        self._listener = Listener(host, family=family_of(host), backlog=backlog)
        start_daemon("pfeife-server", self._accept)

    @property
    def address(self) -> Address:
        """Where to connect to."""
        return self._listener.address

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closed = True
        # An accept that is under way is ended only by a caller; the thread may have ended already.
        with contextlib.suppress(OSError):
            socket.create_connection(self.address[:2], timeout=_CLOSE_TIMEOUT_S).close()
        self._listener.close()

    def forget(self) -> None:
        """Drop the listening socket in a forked process, where nobody accepts."""
        self._is_closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except OSError:
                # A connection that broke while it was made; or all is closed.
                time.sleep(0.01)
                continue
            # The handshake has its own thread: somebody who says nothing must not keep others out.
            start_daemon("pfeife-connection", self._greet, connection)

    def _greet(self, connection: Connection) -> None:
        wire = Wire.accept(connection, self._secret)
        if wire is None:
            return
        try:
            hello = wire.receive(_HELLO_TIMEOUT_S)
        except (OSError, EOFError):
            wire.close()
            return
        self._welcome(wire, hello)
