"""Reading the clocks of a pipeline's ranks off each other: every rank sends the first one a few tiny messages.

Models: the first rank answers one rank after the other. Ignores: everything but the fastest round trip of each.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import torch

from pfeife_accelerate.ir.record import ClockReading, Ping, reading_of
from pfeife_accelerate.runtime.transport import AbstractTransport

__all__ = ["read_clock"]

_TAG = 1 << 28
_ROUND_TRIPS = 20
_CPU = torch.device("cpu")


def read_clock(transport: AbstractTransport, now_ns: Callable[[], int] = perf_counter_ns) -> ClockReading:
    """What the first rank's clock shows beside the own one; all ranks call it at the same place.

    The transport must carry tensors on the CPU.
    """
    if transport.rank == 0:
        for peer in range(1, transport.num_ranks):
            for _ in range(_ROUND_TRIPS):
                transport.post_receive((1,), torch.int64, _CPU, peer, _TAG).wait()
                transport.send(torch.tensor([now_ns()]), peer, _TAG + 1)
        transport.flush()
        return ClockReading(at_ns=now_ns(), offset_ns=0, error_ns=0)
    pings = [_ping(transport, now_ns) for _ in range(_ROUND_TRIPS)]
    transport.flush()
    return reading_of(pings)


def _ping(transport: AbstractTransport, now_ns: Callable[[], int]) -> Ping:
    answer = transport.post_receive((1,), torch.int64, _CPU, 0, _TAG + 1)
    sent_ns = now_ns()
    transport.send(torch.zeros(1, dtype=torch.int64), 0, _TAG)
    answered_ns = int(answer.wait())
    return Ping(sent_ns=sent_ns, answered_ns=answered_ns, received_ns=now_ns())
