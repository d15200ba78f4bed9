"""The control plane of a pipeline: what ranks tell and ask each other beside the tensors of a schedule.

Models: messages pushed into another rank's mailbox; tensors fetched from a rank whose main thread takes no part; the
news that a rank has failed, ended, or died. One server thread a rank accepts, and one a connection reads.
Ignores: what is said; and a rank that is alive but stuck, unless somebody waits for it with a time limit.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Condition, Event, Thread
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.asker import Asker, encoded_error
from pfeife_accelerate.runtime.daemon import start_daemon
from pfeife_accelerate.runtime.door import Door
from pfeife_accelerate.runtime.mailbox import Mailbox
from pfeife_accelerate.runtime.tensor_server import PastProvider, Provider, TensorServer
from pfeife_accelerate.runtime.wire import Address, Json, Wire, encode, local_address

_START_TIMEOUT_S = 120.0
_FETCH_TIMEOUT_S = 1800.0
_CLAIM_TIMEOUT_S = 1.0
# Sending the news of a failure must not take long where a rank is stuck.
_NOTICE_TIMEOUT_S = 0.5
# News of a failure may arrive a little after the broken connection that it explains.
_NEWS_TIMEOUT_S = 2.0
_MAX_FAILURE_TEXT = 4000


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a pipeline that a rank heard of."""

    rank: int
    text: str

    @property
    def first_line(self) -> str:
        """What to say of it in one line."""
        return self.text.strip().partition("\n")[0]


@final
class ControlPlane:
    """One rank's end of the control plane. All methods may be called from any thread."""

    def __init__(self, rank: int, num_ranks: int, store: dist.Store, prefix: str, secret: bytes, host: Address) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.on_failure: Callable[[Failure], None] | None = None
        """Called, in a server thread, with the failure of another rank."""
        self.on_goodbye: Callable[[int], None] | None = None
        """Called, in a server thread, with a rank whose script has ended."""
        self._store = store
        self._prefix = prefix
        self._secret = secret
        self._changed = Condition()
        self._mailbox = Mailbox(self._changed)
        self._server = TensorServer(rank, self._changed)
        self._peers: dict[int, Wire] = {}
        self._ended: set[int] = set()
        self._gone: set[int] = set()
        self._failure: Failure | None = None
        self._told = Event()
        self._is_closed = False
        self._asker = Asker(lambda rank: self._open(rank, "ask"))
        self._answering: set[Wire] = set()
        self._door = Door(host, secret, 2 * num_ranks + 8, self._welcome)

    @classmethod
    def start(cls, rank: int, num_ranks: int, store: dist.Store, master_addr: str, prefix: str) -> ControlPlane:
        """Connect all ranks; every rank calls it, with a prefix that no other use of the store has."""
        try:
            if rank == 0:
                store.set(f"{prefix}/secret", secrets.token_hex(32))
            secret = bytes(store.get(f"{prefix}/secret"))
            plane = cls(rank, num_ranks, store, prefix, secret, local_address(master_addr))
            store.set(f"{prefix}/{rank}", json.dumps(plane._door.address))
            # Of two ranks, the higher connects.
            for peer in range(rank):
                plane._add_peer(peer, plane._open(peer, "peer"))
        except (RuntimeError, OSError, EOFError) as error:
            raise PfeifeError(
                id="PF413", what=f"rank {rank} could not connect to the other ranks", why=str(error)
            ) from error
        with plane._changed:
            if not plane._changed.wait_for(lambda: len(plane._peers) == num_ranks - 1, _START_TIMEOUT_S):
                missing = [peer for peer in range(num_ranks) if peer != rank and peer not in plane._peers]
                raise PfeifeError(
                    id="PF413", what=f"ranks {missing} did not connect to rank {rank} in {_START_TIMEOUT_S:g} s"
                )
        # A forked process (a dataloader's) must not keep connections open that this process's death should close.
        reference = weakref.ref(plane)
        os.register_at_fork(after_in_child=lambda: _forget_in_child(reference()))
        return plane

    # --- mailbox

    def post(self, ranks: Iterable[int], topic: str, body: dict[str, Json]) -> None:
        """Push a message into the mailboxes of ranks. One whose script has ended does not get it."""
        self._check()
        data = encode({"kind": "post", "topic": topic, "body": body})
        for rank in ranks:
            if rank == self.rank:
                self._mailbox.put(topic, body)
                continue
            try:
                self._peers[rank].send_encoded(data)
            except OSError as error:
                if rank not in self._ended:
                    self._raise_lost(rank, error)

    def receive(
        self, topic: str, timeout: float | None = None, abandon: Callable[[], None] | None = None
    ) -> dict[str, Json]:
        """Block for the next message of a topic. `abandon`, called every half second, may raise to end the wait."""
        return self._mailbox.receive(topic, self._check_senders, timeout, abandon)

    def poll(self, topic: str) -> dict[str, Json] | None:
        """Take the next message of a topic, if there is one."""
        self._check()
        return self._mailbox.poll(topic)

    # --- tensors

    def serve(
        self, kind: str, provider: Provider, of_one_moment: bool = False, past: PastProvider | None = None
    ) -> None:
        """Answer requests of a kind by `provider(key)`, called in a server thread; None: there is no such key.

        `of_one_moment`: ranks that have made `n` changes fewer than this one get `past(key, n)`, or are refused.
        """
        self._server.serve(kind, provider, of_one_moment, past)

    @property
    def clock(self) -> int:
        """The own logical clock."""
        return self._server.clock

    def advance_clock(self) -> None:
        """Let the requests for the next tick be answered."""
        self._server.advance_clock()

    def count_change(self) -> None:
        """Inside `busy`: what is served of one moment has changed, as it does or will do on all ranks."""
        self._server.changes += 1

    def busy(self) -> AbstractContextManager[bool]:
        """While held, no request is answered: hold it to change tensors. Do not fetch inside."""
        return self._server.busy

    def fetch(
        self, rank: int, kind: str, key: str, clock: int = 0, timeout: float | None = _FETCH_TIMEOUT_S
    ) -> torch.Tensor:
        """Another rank's tensor, as of a moment when its clock has reached `clock`; its main thread takes no part."""
        return self.fetch_many(rank, kind, [key], clock, timeout)[0]

    def fetch_many(
        self, rank: int, kind: str, keys: Sequence[str], clock: int = 0, timeout: float | None = _FETCH_TIMEOUT_S
    ) -> list[torch.Tensor]:
        """Several tensors, all of one moment, in one round trip. The other rank holds copies of all meanwhile."""
        self._check()
        if rank == self.rank:
            if clock > self.clock:
                raise PfeifeError(id="PF412", what=f"rank {rank} asks itself for tick {clock} at tick {self.clock}")
            return self._server.snapshot(kind, keys, clock, self._server.changes)
        changes = self._server.changes
        request: dict[str, Json] = {"kind": kind, "keys": list(keys), "clock": clock, "changes": changes}
        try:
            return self._asker.ask(rank, request, self._check, timeout)
        except TimeoutError as error:
            what = f"rank {rank} did not give {kind} as of tick {clock} within {timeout:g} s"
            raise PfeifeError(id="PF411", what=what) from error
        except (OSError, EOFError) as error:
            self._raise_lost(rank, error)
        except PfeifeError as error:
            if error.id == "PF412":  # that rank has stopped, perhaps for a failure that this one is yet to hear of
                self._check_after_news(lambda: rank in self._gone | self._ended)
            raise

    # --- failure and end

    @property
    def failure(self) -> Failure | None:
        """The first failure that this rank heard of, its own included."""
        return self._failure

    def wait_for_failure(self, timeout: float) -> Failure | None:
        """The failure, waiting for the news of it if need be."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, timeout)
        return self._failure

    def claim_failure(self) -> bool:
        """Whether this rank is the first of all to say that it failed, so that its error is the one to print."""
        counts: list[int] = []

        def count() -> None:
            try:
                counts.append(self._store.add(f"{self._prefix}/failures", 1))
            except RuntimeError:
                # The store may be gone with the rank that held it; then this error is as good as any.
                counts.append(1)

        thread = Thread(target=count, name="pfeife-claim", daemon=True)
        thread.start()
        thread.join(_CLAIM_TIMEOUT_S)
        return counts in ([1], [])

    def report_failure(self, text: str) -> None:
        """Tell all ranks that this one has failed, and wake everything that waits here."""
        self._record(Failure(rank=self.rank, text=text[:_MAX_FAILURE_TEXT]))

    def close(self, wait_for_others: bool = False) -> None:
        """Say goodbye and close; with `wait_for_others`, answer on until all ranks have said goodbye, or one failed."""
        if self._is_closed:
            return
        self._server.stop()
        if self._failure is None:
            goodbye = encode({"kind": "goodbye"})
            for wire in self._peers.values():
                wire.try_send(goodbye, _NOTICE_TIMEOUT_S)
            if wait_for_others:
                with self._changed:
                    self._changed.wait_for(lambda: self._failure is not None or self._all_others_ended())
        if self._failure is not None:
            # The news must be out before the connections break.
            self._told.wait(_NEWS_TIMEOUT_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for wire in self._wires():
            # Its reader wakes up and frees it.
            wire.shutdown()
        self._asker.close()
        self._door.close()

    def _record(self, failure: Failure) -> None:
        with self._changed:
            if self._failure is not None or self._is_closed:
                return
            self._failure = failure
        # Pass it on first, also when it is another's: should this process end now, its broken connections must not be
        # taken for the cause.
        notice = encode({"kind": "failure", "rank": failure.rank, "text": failure.text})
        deadline = time.monotonic() + _NEWS_TIMEOUT_S
        for peer, wire in list(self._peers.items()):
            if peer not in self._gone:
                wire.try_send(notice, max(0.0, min(_NOTICE_TIMEOUT_S, deadline - time.monotonic())))
        self._told.set()
        self._server.stop()
        self._asker.interrupt()
        with self._changed:
            self._changed.notify_all()
        if failure.rank != self.rank and self.on_failure is not None:
            self.on_failure(failure)

    def _check(self) -> None:
        failure = self._failure
        if failure is not None:
            what = f"stopped because rank {failure.rank} failed: {failure.first_line}"
            raise PfeifeError(id="PF420", what=what)
        if self._is_closed:
            raise PfeifeError(id="PF421", what=f"rank {self.rank} has closed its connections to the other ranks")

    def _check_senders(self) -> None:
        self._check()
        if self._all_others_ended():
            raise PfeifeError(
                id="PF412",
                what=f"rank {self.rank} waits for a message, and the scripts of all other ranks have ended",
                why="the ranks of a pipeline must run the same script on the same data",
            )

    def _all_others_ended(self) -> bool:
        return len(self._ended | self._gone) == self.num_ranks - 1

    def _raise_lost(self, rank: int, error: Exception) -> NoReturn:
        """Say why a connection broke: by the news of a failure if there is any."""
        self._check_after_news(lambda: rank in self._gone)
        raise PfeifeError(id="PF412", what=f"rank {rank} has ended and can no longer be asked") from error

    def _check_after_news(self, has_come: Callable[[], bool]) -> None:
        """Raise for a failure, once it is known how another rank came to its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._is_closed or has_come(), _NEWS_TIMEOUT_S)
        self._check()

    # --- connections

    def _wires(self) -> list[Wire]:
        return [*self._peers.values(), *self._answering, *self._asker.wires()]

    def _forget(self) -> None:
        """Drop all connections in a forked process, without ending those of its parent."""
        # No lock: a thread that exists only in the parent may hold it.
        self._is_closed = True
        self._door.forget()
        for wire in self._wires():
            wire.forget()

    def _open(self, rank: int, role: str) -> Wire:
        address = tuple(json.loads(self._store.get(f"{self._prefix}/{rank}")))
        wire = Wire.connect(address, self._secret)
        wire.send({"role": role, "rank": self.rank})
        return wire

    def _add_peer(self, rank: int, wire: Wire) -> None:
        with self._changed:
            self._peers[rank] = wire
            self._changed.notify_all()
        start_daemon(f"pfeife-peer-{rank}", self._listen, rank, wire)

    def _welcome(self, wire: Wire, hello: dict[str, Any]) -> None:
        if hello["role"] == "peer":
            self._add_peer(hello["rank"], wire)
        else:
            self._answer(wire)

    def _listen(self, peer: int, wire: Wire) -> None:
        """Read what a peer pushes, until its end."""
        while True:
            try:
                message = wire.receive()
            except (OSError, EOFError):
                break
            match message["kind"]:
                case "post":
                    self._mailbox.put(message["topic"], message["body"])
                case "failure":
                    self._record(Failure(rank=message["rank"], text=message["text"]))
                case "goodbye":
                    with self._changed:
                        self._ended.add(peer)
                        self._changed.notify_all()
                    if self.on_goodbye is not None:
                        self.on_goodbye(peer)
                case kind:
                    raise AssertionError(f"rank {peer} sent {kind!r}")
        wire.close()
        with self._changed:
            self._gone.add(peer)
            self._changed.notify_all()
        if peer not in self._ended:
            self._record(Failure(rank=peer, text=f"rank {peer} ended without a word (killed?)"))

    def _answer(self, wire: Wire) -> None:
        """Answer the requests of one connection, one after the other."""
        with self._changed:
            self._answering.add(wire)
        try:
            while not self._is_closed:
                request = wire.receive()
                try:
                    tensors = self._server.snapshot(
                        request["kind"], request["keys"], request["clock"], request["changes"]
                    )
                except PfeifeError as error:
                    wire.send(encoded_error(error))
                else:
                    wire.send_tensors({}, tensors)
                    # Do not keep copies until the next request.
                    del tensors
        except (OSError, EOFError):
            # The asker has what it wanted, or is gone.
            pass
        with self._changed:
            self._answering.discard(wire)
        wire.close()


def _forget_in_child(plane: ControlPlane | None) -> None:
    if plane is not None:
        plane._forget()
