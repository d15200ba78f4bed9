"""The option `trace`: some training steps of the first pipeline are recorded, and its first rank writes them down.

Models: planned steps of the model that trains first; clocks are read before and after each recorded step, so that one
that drifts does no harm; the file is written anew after each of them, so that a script may end at any time.
Ignores: other pipelines, evaluations, and steps in the exact two-phase order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.codec import decode, encode
from pfeife_accelerate.ir.files import write_whole
from pfeife_accelerate.ir.record import ClockFit, ClockReading, RankRecord, assembled
from pfeife_accelerate.ir.trace import RecordedStep, Trace, trace_to_json
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.runtime.clock_pings import read_clock
from pfeife_accelerate.runtime.executor import Executor
from pfeife_accelerate.runtime.mesh import PipelineMesh
from pfeife_accelerate.runtime.recorder import Recorder
from pfeife_accelerate.runtime.remote import ControlPlane
from pfeife_accelerate.runtime.step import RankProgram, StepInputs, StepState
from pfeife_accelerate.runtime.transport import DistributedTransport

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel

__all__ = ["Tracing", "keep_trace", "trace_file"]

_LOG = get_logger(__name__)
_TOPIC = "trace"
_AFTER, _STEPS = 2, 3


class Tracing:
    """Counts the planned training steps of a pipeline's rank, and records those that are wanted."""

    def __init__(
        self, plugin: PfeifePlugin, mesh: PipelineMesh, control: ControlPlane, executor: Executor, device: torch.device
    ) -> None:
        """All ranks of the pipeline make theirs.

        Raises: PfeifeError PF237 where the file cannot be written.
        """
        self._file = trace_file(plugin) if mesh.rank == 0 else None
        after = _AFTER if plugin.trace_after is None else plugin.trace_after
        self._wanted = range(after + 1, after + 1 + (plugin.trace_steps or _STEPS))
        self._mesh = mesh
        self._control = control
        self._executor = executor
        self._device = device
        self._model: PipelinedModel | None = None
        self._recorder: Recorder | None = None
        self._clocks: DistributedTransport | None = None
        self._steps: list[RecordedStep] = []
        self._number = 0

    @classmethod
    def wanted(
        cls, plugin: PfeifePlugin, mesh: PipelineMesh, control: ControlPlane, executor: Executor, device: torch.device
    ) -> Tracing | None:
        """For a rank whose steps are to be recorded: one of the first pipeline, if the option is set."""
        is_wanted = plugin.trace is not None and mesh.pipeline_index == 0
        return cls(plugin, mesh, control, executor, device) if is_wanted else None

    def run(self, model: PipelinedModel, program: RankProgram, inputs: StepInputs, state: StepState) -> None:
        """Run a planned training step, which all ranks of the pipeline do now."""
        if self._model is None:
            self._model = model
        if model is not self._model:
            self._executor.run(program, inputs, state)
            return
        self._number += 1
        if self._number not in self._wanted:
            self._executor.run(program, inputs, state)
            return
        recorder, before = self._start()
        self._executor.run(program, inputs, state, recorder)
        fit = ClockFit(before=before, after=self._read_clock())
        self._collect(recorder.record(self._mesh.rank, fit), len(inputs.microbatches))
        if self._number == self._wanted[-1]:
            recorder.close()
            self._recorder = self._clocks = None

    def close(self) -> None:
        """At the end of the script: say so if there was nothing to record."""
        if self._file is not None and self._number < self._wanted[0]:
            _LOG.warning(
                "no step was recorded into %s: the script ran %d planned training step(s), and the first to be "
                "recorded is number %d (options trace_after, trace_steps)",
                self._file, self._number, self._wanted[0],
            )  # fmt: skip

    def _start(self) -> tuple[Recorder, ClockReading]:
        if self._recorder is None:
            transport = self._executor.transport
            # What matches messages by order (nccl) waits for them in a stream.
            self._recorder = Recorder(transport, self._device, waits_in_stream=transport.needs_order)
        before = self._read_clock()
        self._recorder.begin()
        return self._recorder, before

    def _read_clock(self) -> ClockReading:
        if self._clocks is None:
            self._clocks = DistributedTransport(self._mesh.pipeline_control_group, torch.device("cpu"))
        return read_clock(self._clocks)

    def _collect(self, own: RankRecord, num_microbatches: int) -> None:
        first = self._mesh.pipeline_index * self._mesh.pipeline_size
        if self._mesh.rank != 0:
            self._control.post([first], _TOPIC, {"record": json.dumps(encode(own))})
            return
        records = [own]
        while len(records) < self._mesh.pipeline_size:
            data: Any = json.loads(str(self._control.receive(_TOPIC)["record"]))
            records.append(decode(RankRecord, data, "record"))
        step = RecordedStep.of(
            assembled(records),
            num_ranks=self._mesh.pipeline_size,
            number=self._number,
            num_microbatches=num_microbatches,
            # A transfer has an end on either side.
            clock_error_s=2 * max(record.clock.error_s for record in records),
        )
        self._steps.append(step)
        assert self._file is not None and self._model is not None and self._model.plan is not None
        keep_trace(self._file, Trace(plan=self._model.plan, steps=tuple(self._steps)))


def trace_file(plugin: PfeifePlugin) -> Path:
    """Where the trace is to be written.

    Raises: PfeifeError PF237 where that is not possible.
    """
    assert plugin.trace is not None
    file = Path(plugin.trace)
    if not file.absolute().parent.is_dir():
        raise PfeifeError(
            id="PF237",
            what=f"the trace cannot be written to {file}",
            where=f"trace: {file}",
            why="there is no such folder",
            hints=(f"mkdir -p {file.absolute().parent}",),
        )
    return file


def keep_trace(file: Path, trace: Trace) -> None:
    """Write the trace as it is so far; where that is not possible, training goes on."""
    try:
        write_whole(file, trace_to_json(trace))
    except OSError as error:
        _LOG.warning("the trace cannot be kept in %s: %s", file, error)
