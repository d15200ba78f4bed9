"""The option `trace` and its file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pfeife_accelerate.config import PfeifePlugin
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import PipelinePlan, ScheduleFamily, ScheduleSpec, StageCost, StageSpec
from pfeife_accelerate.ir.trace import RecordedStep, Trace
from pfeife_accelerate.session.tracing import keep_trace, trace_file
from pfeife_accelerate.tools.trace import read_trace

pytestmark = pytest.mark.local


def test_a_folder_that_is_not_there_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(PfeifeError, match="PF237 the trace cannot be written to") as caught:
        trace_file(PfeifePlugin(trace=str(tmp_path / "none" / "trace.json")))
    assert f"mkdir -p {tmp_path / 'none'}" in str(caught.value)


def test_any_other_file_will_do(tmp_path: Path):
    assert trace_file(PfeifePlugin(trace=str(tmp_path / "trace.json"))) == tmp_path / "trace.json"
    assert trace_file(PfeifePlugin(trace="trace.json")) == Path("trace.json")


def test_a_file_that_cannot_be_written_later_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plan = PipelinePlan(
        graph_fingerprint="x",
        cuts=(),
        stage_ranks=(0,),
        per_rank=(("0F0", "0B0"),),
        estimate_s=3.0,
        peak_bytes=(0,),
        spec=ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=1, num_microbatches=1),
        stages=(StageSpec(op_range=(0, 1), params=(), cost=StageCost(forward_s=1.0, backward_s=2.0)),),
        edges=(),
    )
    actions = (("0F0", 0.0, 1.0), ("0B0", 1.0, 3.0))
    step = RecordedStep(number=3, num_microbatches=1, clock_error_s=0.0, per_rank=(actions,))
    trace = Trace(plan=plan, steps=(step,))
    keep_trace(tmp_path / "trace.json", trace)
    assert read_trace(tmp_path / "trace.json") == trace
    with caplog.at_level(logging.WARNING):
        keep_trace(tmp_path / "none" / "trace.json", trace)
    assert "the trace cannot be kept in" in caplog.text
