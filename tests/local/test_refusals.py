"""What is refused, or noticed as a fault of the package, by the parts that a step goes through: each says why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.failure import CaptureFailure
from pfeife_accelerate.capture.inputs import values
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.capture.op_graph import follow, to_op_graph
from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.integration import training
from pfeife_accelerate.integration.activation import activate
from pfeife_accelerate.ir import ScheduleFamily, ScheduleSpec
from pfeife_accelerate.runtime.mesh import build_mesh
from pfeife_accelerate.schedule import build
from pfeife_accelerate.session.call import Progress
from pfeife_accelerate.session.conductor import Announcement, Conductor
from pfeife_accelerate.session.outputs import refuse_loss_of_inputs
from pfeife_accelerate.session.programs import ProgramCache, Run
from tests.loss_harness import deferred

pytestmark = pytest.mark.local

CPU = torch.device("cpu")


class Pair(nn.Module):
    """Two layers in either order; with `target`, its own loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, target=None, backwards=False):
        y = self.first(self.last(x)) if backwards else self.last(torch.tanh(self.first(x)))
        return y if target is None else nn.functional.mse_loss(y, target)


def test_a_pipeline_of_no_processes():
    with pytest.raises(PfeifeError, match=r"PF121 torch\.distributed is not initialised") as error:
        build_mesh(None)
    assert error.value.hints[0].startswith("start the script by: accelerate launch")


def test_a_call_that_uses_the_parameters_in_another_order_than_they_are_placed():
    model = Pair()
    stages = {"first.weight": (0,), "first.bias": (0,), "last.weight": (1,), "last.bias": (1,)}
    capture = ModelCapture(model, CPU)
    call = capture.call((torch.randn(4, 8),), {}, None)
    graph = to_op_graph(call.graph, call.bindings)
    assert len(follow(call.graph, graph, stages, 2)) == 1
    call = capture.call((torch.randn(4, 8),), {"backwards": True}, None)
    graph = to_op_graph(call.graph, call.bindings)
    with pytest.raises(PfeifeError, match=r"PF221 operation \w+ cannot run on the stage that holds its") as error:
        follow(call.graph, graph, stages, 2)
    assert "test_refusals.py" in str(error.value.where)
    assert "in another order than the call that the plan was made for" in str(error.value)


def test_a_models_own_loss_of_an_argument_that_needs_a_gradient():
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    capture = ModelCapture(Pair(), CPU)
    refuse_loss_of_inputs(capture.call((x.requires_grad_(), target), {}, None))
    captured = capture.call((x, target.requires_grad_()), {}, None)
    with pytest.raises(PfeifeError, match=r"PF511 the model's own loss reads one of its arguments .*\(4, 8\)") as error:
        refuse_loss_of_inputs(captured)
    assert "pass the argument detached" in error.value.hints


def test_outputs_of_a_pipelined_model_for_one_that_runs_unpipelined():
    output = deferred(torch.randn(4, 3))
    with pytest.raises(PfeifeError, match="PF534 the output of a pipelined model was passed to a prepared") as error:
        values((output,), {})
    assert "pass it detached" in error.value.hints
    assert "test_refusals.py" in str(error.value.where)


def test_a_precision_that_pipelines_do_not_have(monkeypatch):
    monkeypatch.setattr(training.session, "current", lambda: object())
    accelerator = SimpleNamespace(mixed_precision="fp8", _models=[], device=CPU)
    with pytest.raises(PfeifeError, match="PF512 mixed_precision='fp8' is not supported on a pipelined model"):
        training.prepare_model(lambda *_: None, accelerator, Pair())
    assert accelerator._models == [], "a refused model is not kept"


def test_a_schedule_for_a_call_that_this_rank_has_not_made():
    late = Announcement(run=Run.FORWARD, call=7).to_json()
    control = SimpleNamespace(serve=lambda *_: None, receive=lambda topic, abandon: late)
    follower = Conductor(control, 0, 0, 2)
    call = SimpleNamespace(number=8, progress=Progress.PENDING)
    with pytest.raises(PfeifeError, match="PF430 rank 0 has no call number 7 of the model") as error:
        follower.follow(call, Progress.DONE, lambda *_: None)
    assert "on some ranks of the pipeline and not on others" in str(error.value)


@pytest.mark.parametrize("run", [Run.ALONE, Run.PLAN])
def test_announcements_without_a_schedule_have_no_program(run):
    spec = ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=2, num_microbatches=2)
    call = ModelCapture(Pair(), CPU).call((torch.randn(4, 8),), {}, None)
    programs = ProgramCache(build(spec), 0)
    needed = call.graph.result_names()
    staged = programs.staged(call.graph, (1,), needed)
    programs.program(staged, needed, needed, Run.PLANNED, 2)
    with pytest.raises(InternalError, match=f"PF432 nothing is scheduled for '{run.value}'"):
        programs.program(staged, needed, needed, run, 2)


def test_options_of_another_kind():
    with pytest.raises(PfeifeError, match="PF102 pfeife_plugin must be a PfeifePlugin, got dict") as error:
        activate({"num_microbatches": 4})
    assert error.value.hints == ("from pfeife_accelerate import PfeifePlugin",)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 8)

    def forward(self, x):
        return self.layer(x)[0]


def test_recurrent_layers_are_named():
    with pytest.raises(
        CaptureFailure, match=r"PF510 Recurrent holds recurrent layers \(LSTM\), which are not captured"
    ):
        ModelCapture(Recurrent(), CPU).call((torch.randn(4, 3, 8),), {}, None)
