"""One step of emulated devices: the executor of every rank in a thread of this process, recorded.

Models: any lowered schedule, over `LocalTransport`. Ignores: processes; `emulated.py` does not mind which transport it
is over, as long as the ranks share a host's clock.
"""

from __future__ import annotations

import threading
import time

import torch

from pfeife_accelerate.ir.actions import Schedule
from pfeife_accelerate.ir.record import ClockFit, ClockReading, RankRecord, assembled
from pfeife_accelerate.ir.timeline import Timeline
from pfeife_accelerate.runtime.emulated import (
    EmulatedDevice,
    EmulatedTransport,
    Speeds,
    emulated_inputs,
    emulated_program,
    sends_s,
)
from pfeife_accelerate.runtime.executor import Executor
from pfeife_accelerate.runtime.local_transport import LocalTransport
from pfeife_accelerate.runtime.recorder import Recorder
from pfeife_accelerate.runtime.step import StepState
from pfeife_accelerate.runtime.transport import AbstractTransport
from pfeife_accelerate.schedule import Messages

__all__ = ["SAME_CLOCK", "run_emulated", "run_rank"]

_CPU = torch.device("cpu")
_BEFORE_START_S = 0.02  #: for all threads to be there
_READING = ClockReading(at_ns=0, offset_ns=0, error_ns=0)
#: Of ranks on one host.
SAME_CLOCK = ClockFit(before=_READING, after=_READING)


def run_emulated(lowered: Schedule, messages: Messages, speeds: Speeds) -> Timeline:
    """The recorded timeline of one step of all ranks."""
    _warm_up()
    transports = LocalTransport.make(lowered.num_ranks)
    records: list[RankRecord] = []
    errors: list[BaseException] = []
    start_s = time.perf_counter() + _BEFORE_START_S

    def rank(transport: LocalTransport) -> None:
        try:
            records.append(run_rank(transport, lowered, messages, speeds, start_s))
        except BaseException as error:
            errors.append(error)  # raised by the caller
            transport.abort(str(error))

    threads = [threading.Thread(target=rank, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return assembled(records)


def _warm_up() -> None:
    """The first backward from a given gradient imports a second's worth of torch."""
    one = torch.ones(1, requires_grad=True)
    torch.autograd.backward([2 * one], [torch.ones(1)])


def run_rank(
    transport: AbstractTransport, lowered: Schedule, messages: Messages, speeds: Speeds, start_s: float
) -> RankRecord:
    """One rank's part, from `start_s` of the host's clock on."""
    rank, device = transport.rank, EmulatedDevice()
    program = emulated_program(lowered, rank, messages, speeds, device)
    inputs = emulated_inputs(messages, lowered.num_microbatches)
    emulated = EmulatedTransport(transport, device, sends_s(program.actions, speeds))
    recorder = Recorder(emulated, _CPU)
    state = StepState(lowered.num_microbatches)
    time.sleep(max(0.0, start_s - time.perf_counter()))
    device.start()
    recorder.begin()
    Executor(emulated, _CPU).run(program, inputs, state, recorder)
    recorder.close()
    return recorder.record(rank, SAME_CLOCK)
