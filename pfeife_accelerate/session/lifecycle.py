"""The one running pipeline set-up of this process: its options, its place among the other processes, its connections.

Models: start once, stop once; after the stop the place is still known, the process groups are gone.
Ignores: how Accelerate is shown all this; `integration/` does that.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pfeife_accelerate.capture.compiled import Compilation
from pfeife_accelerate.compat import default_store
from pfeife_accelerate.config import PfeifePlugin, process_variable
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.plan import PipelinePlan
from pfeife_accelerate.log import get_logger, set_rank, set_verbose
from pfeife_accelerate.runtime import failure
from pfeife_accelerate.runtime.connect import connect
from pfeife_accelerate.runtime.executor import Executor
from pfeife_accelerate.runtime.mesh import MeshShape, PipelineMesh, build_mesh, use_pipelines_as_world
from pfeife_accelerate.runtime.remote import ControlPlane
from pfeife_accelerate.runtime.step import RankProgram, StepInputs, StepState
from pfeife_accelerate.runtime.tensor_server import TooEarly
from pfeife_accelerate.runtime.transport import AbstractTransport
from pfeife_accelerate.session.batch_check import BatchCheck
from pfeife_accelerate.session.conductor import Announcement, Conductor
from pfeife_accelerate.session.hand_changes import HandChanges
from pfeife_accelerate.session.optimizer_state import OptimizerStates
from pfeife_accelerate.session.programs import Run
from pfeife_accelerate.session.tracing import Tracing

if TYPE_CHECKING:
    from pfeife_accelerate.session.call import Call
    from pfeife_accelerate.session.model import PipelinedModel

__all__ = ["Session", "current", "place", "start", "stop", "validate_world"]

_LOGGER = get_logger(__name__)
_BARRIER_POLL_S = 0.002
_MEETINGS = ("barrier", "settle", "settled", "load_state_dict")


class Session:
    """What a process needs to take part in its pipeline."""

    def __init__(
        self,
        plugin: PfeifePlugin,
        mesh: PipelineMesh,
        control: ControlPlane,
        transport: AbstractTransport,
        device: torch.device,
    ) -> None:
        self.plugin = plugin
        self.mesh = mesh
        self.process_id = os.getpid()
        self.control = control
        self.device = device
        self.transport = transport
        self.executor = Executor(transport, device)
        self.tracing = Tracing.wanted(plugin, mesh, control, self.executor, device)
        self.conductor = Conductor(control, mesh.pipeline_index * mesh.pipeline_size, mesh.rank, mesh.pipeline_size)
        self.conductor.in_barriers = self._in_barriers
        first = mesh.pipeline_index * mesh.pipeline_size
        self.batch_check = BatchCheck(control, first + mesh.pipeline_size - 1, mesh.pipeline_size)
        self.models: list[PipelinedModel] = []
        self._parameter_ids: set[int] = set()
        self.num_whole_copies = 0
        self._meetings: Counter[str] = Counter()
        self.num_meetings = 0
        self.synchronises: Callable[[], bool] = lambda: True
        """Whether this backward is to average gradients over the pipelines; Accelerate knows."""
        self.compilation: Compilation | None = None
        """How stages are compiled, if they are."""
        self.optimizers = OptimizerStates(self)
        self.hand_changes = HandChanges()
        control.serve("state", self._give_state, of_one_moment=True, past=self._give_state)
        control.serve("gradient", self._give_gradient)
        self.num_steps_under_way = 0
        """Optimizers inside `step` (one may call another's)."""

    def follow_plan(self, plan: PipelinePlan) -> PipelinePlan:
        """The plan of another model as this pipeline will follow it; all ranks come here together.

        The loss is computed on the conductor, which is one rank for all models: the one that the first plan wants. Of
        a later plan that wants another one, these two ranks change places.
        """
        if not self.models:
            self.conductor.lead_from(plan.loss_rank)
            self.batch_check.leader = self.mesh.pipeline_index * self.mesh.pipeline_size + plan.loss_rank
            return plan
        leader = self.conductor.leader
        if plan.loss_rank != leader:
            _LOGGER.info("ranks %d and %d change places in the plan of another model", plan.loss_rank, leader)
        return plan.with_swapped(plan.loss_rank, leader)

    def followers(self) -> tuple[int, ...]:
        """The ranks of the pipeline other than the conductor."""
        return tuple(rank for rank in range(self.mesh.pipeline_size) if rank != self.conductor.leader)

    def barrier(self) -> None:
        """Wait until every rank of the launch, of all pipelines, is here; meanwhile do what the others wait for."""
        self._meet("barrier", range(self.mesh.world_size))

    def meet(self, what: str) -> None:
        """Wait until every rank of this pipeline is here, for the same purpose."""
        self._meet(what, self.mesh.shape.pipeline_ranks(self.mesh.pipeline_index))

    def _meet(self, what: str, ranks: Sequence[int]) -> None:
        assert what in _MEETINGS, what
        self._meetings[what] += 1
        topic = f"{what} {self._meetings[what]}"
        missing = {r for r in ranks if r != self.mesh.world_rank}
        self.control.post(missing, topic, {"rank": self.mesh.world_rank})
        while missing:
            if (body := self.control.poll(topic)) is not None:
                missing.discard(int(str(body["rank"])))
            elif not self.service(urgent=True):
                self.conductor.send_off(missing)
                time.sleep(_BARRIER_POLL_S)
        with self.control.busy():
            self.hand_changes.note_moment(self.models)
            self.num_meetings += 1

    def _in_barriers(self) -> set[int]:
        waiting: set[int] = set()
        for what in _MEETINGS:
            topic, bodies = f"{what} {self._meetings[what] + 1}", []
            while (body := self.control.poll(topic)) is not None:
                bodies.append(body)
            for body in bodies:
                waiting.add(int(str(body["rank"])))
                self.control.post([self.mesh.world_rank], topic, body)
        return waiting

    def service(self, *, urgent: bool = False) -> bool:
        """Run what other ranks wait for; called whenever the script enters this package.

        `urgent`: the script does not go on before that is done.
        """
        return self.conductor.service(self.run, self.serve_demand, urgent=urgent)

    @property
    def waiting_for(self) -> int | None:
        """The rank of the launch that the main thread waits for at this moment; to be read from another thread."""
        peer = self.transport.waiting_for
        if peer is None:
            return self.conductor.waiting_for
        return self.mesh.pipeline_index * self.mesh.pipeline_size + peer

    def serve_demand(self, call: Call) -> None:
        """On the conductor: run the forward half of a call that another rank reads."""
        call.resolver.bring_forward(call)

    def settle(self) -> None:
        """Before parameters change: calls whose backward has not come, but which may be read, run their forward."""
        conductor = self.conductor
        if not conductor.open_calls.take_not_asked():
            return
        self.service()
        for call in conductor.open_calls.readable():
            if conductor.leads:
                call.resolver.bring_forward(call, may_guess=False)
            else:
                conductor.demand(call)
        self.meet("settle")  # the demands come before the message that their sender is here, ...
        self.service()
        self.meet("settled")  # ... and what is announced for them before the message that it has run
        self.service()

    def reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp) -> None:
        """All-reduce a CPU tensor over the pipeline; meanwhile do what the others wait for."""
        group = self.mesh.pipeline_control_group
        if not self.conductor.open_calls:
            dist.all_reduce(tensor, op=operation, group=group)
            return
        work = dist.all_reduce(tensor, op=operation, group=group, async_op=True)
        while not work.is_completed():
            if not self.service(urgent=True):
                time.sleep(_BARRIER_POLL_S)
        work.wait()

    def run(self, call: Call, announcement: Announcement) -> None:
        """Take part in an announced schedule."""
        call.resolver.run_announced(call, announcement)

    def execute(
        self, model: PipelinedModel, run: Run, program: RankProgram, inputs: StepInputs, state: StepState
    ) -> None:
        """Run this rank's part of a schedule, and record it if that is wanted."""
        if self.tracing is not None and run is Run.PLANNED:
            self.tracing.run(model, program, inputs, state)
        else:
            self.executor.run(program, inputs, state)

    def add(self, model: PipelinedModel) -> None:
        """Make a model's parameters available to other ranks."""
        self.models.append(model)
        self._parameter_ids |= {id(parameter) for parameter in model.placement.parameters.values()}

    def model_of(self, module: nn.Module) -> PipelinedModel | None:
        """The pipelined model behind a module that has been planned and placed."""
        return next((model for model in self.models if model.module is module), None)

    def parameters_counted_here(self) -> dict[int, bool]:
        """For each parameter of a placed model, by `id`: whether this rank counts it in sums over the model."""
        return {
            id(parameter): model.placement.counts_here(name)
            for model in self.models
            for name, parameter in model.placement.parameters.items()
        }

    def hold_still(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before an optimizer step: nobody may read half-updated parameters.

        Returns: the step's arguments, if other ones are to be used.
        """
        if self.optimizers.is_trying:
            return None
        self.optimizers.refuse_mixing(optimizer)
        self.settle()
        self._hold()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None
        if len(args) > 1:
            return (args[0], self._outside_step(closure), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._outside_step(closure)}

    def move_on(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After an optimizer step. A rank may step an optimizer of its own, which the others never do."""
        if self.optimizers.is_trying:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        is_shared = any(id(parameter) in self._parameter_ids for parameter in parameters)
        if is_shared:
            self.control.count_change()
            self.hand_changes.note_step(self.models)
        self._release()
        if is_shared:
            self.control.advance_clock()

    @contextmanager
    def only_own_gradients(self) -> Iterator[None]:
        """As inside an optimizer's step: parameters elsewhere show no gradient."""
        self.num_steps_under_way += 1
        try:
            yield
        finally:
            self.num_steps_under_way -= 1

    def _hold(self) -> None:
        self.control.busy().__enter__()
        self.num_steps_under_way += 1

    def _release(self) -> None:
        self.num_steps_under_way -= 1
        self.control.busy().__exit__(None, None, None)

    def _outside_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A step's closure computes gradients, for which other ranks must be answered."""

        def run() -> Any:
            self._release()
            try:
                return closure()
            finally:
                self._hold()

        return run

    def note_change(self) -> None:
        """Parameters have been replaced, on all ranks."""
        with self.control.busy():
            self.control.count_change()
        self.tick()

    def tick(self) -> None:
        """All ranks have come to the same moment: values are of it from here on."""
        with self.control.busy():
            self.hand_changes.note_moment(self.models)
        self.control.advance_clock()

    def _give_gradient(self, key: str) -> torch.Tensor:
        index, _, name_and_edits = key.partition("/")
        return self._model_numbered(index).own_gradients.give(name_and_edits)

    def _give_state(self, key: str, steps_before: int = 0) -> torch.Tensor | None:
        index, meetings, name = key.split("/", 2)
        if self.num_meetings < int(meetings):
            raise TooEarly("this rank is still in a barrier that the other one has left")
        return self.hand_changes.value(self._model_numbered(index), name, steps_before)

    def _model_numbered(self, index: str) -> PipelinedModel:
        if int(index) >= len(self.models):
            raise TooEarly(f"model number {index} is still being placed")  # another rank was faster
        return self.models[int(index)]


class _Holder:
    """A process has at most one session, as it has one default process group."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.place: MeshShape | None = None


_HOLDER: Final = _Holder()


def start(plugin: PfeifePlugin, device: torch.device | None = None) -> Session:
    """Build the mesh and make pipelines the world that torch.distributed shows; later calls give the same session."""
    running = current()
    if running is not None:
        if running.plugin != plugin:
            raise PfeifeError(
                id="PF122",
                what="a pipeline with other options is running in this process",
                where=f"running: {running.plugin}",
                why="process groups and stages are made once",
                hints=("pass the same options to every Accelerator of the script",),
            )
        return running
    device = device or torch.device("cpu")
    mesh = build_mesh(plugin.pipeline_size)
    store = default_store()
    set_rank(mesh.world_rank, mesh.world_size)
    set_verbose(plugin.verbose)
    control = ControlPlane.start(
        mesh.world_rank, mesh.world_size, store, process_variable("MASTER_ADDR") or "127.0.0.1", "pfeife"
    )
    transport = connect(mesh, store, device)
    atexit.register(_leave_groups)  # runs after the guard's own handler, which waits for all ranks
    guard = failure.install(control, mesh.world_rank, mesh.world_size)
    use_pipelines_as_world(mesh)
    session = Session(plugin, mesh, control, transport, device)
    guard.watch(lambda: session.waiting_for)
    _HOLDER.session = session
    _HOLDER.place = mesh.shape
    register_optimizer_step_pre_hook(session.hold_still)
    register_optimizer_step_post_hook(session.move_on)
    _LOGGER.info(
        "pipeline %d of %d, rank %d of %d", mesh.pipeline_index, mesh.num_pipelines, mesh.rank, mesh.pipeline_size
    )
    return session


def current() -> Session | None:
    """The running session of this process, or None."""
    session = _HOLDER.session
    # A forked data-loading process inherits the object but not the connections.
    return session if session is not None and session.process_id == os.getpid() else None


def place() -> MeshShape | None:
    """Which rank of which pipeline this process is or was; None when no session was ever started."""
    return _HOLDER.place


def stop() -> None:
    """End the session: wait for all ranks, who may still need something from this one, and close the connections."""
    session = current()
    if session is None:
        return
    _HOLDER.session = None
    if dist.is_initialized():
        session.barrier()
        if session.tracing is not None:
            session.tracing.close()
        dist.destroy_process_group()


def validate_world(*, world_size: int, pipeline_size: int | None) -> None:
    """Refuse, in the launcher, what every rank would refuse after its start."""
    MeshShape.of(world_rank=0, world_size=world_size, pipeline_size=pipeline_size)


def _leave_groups() -> None:
    session = current()
    failed = session is not None and session.control.failure is not None
    if session is not None and session.tracing is not None and not failed:
        session.tracing.close()
    _HOLDER.session = None
    torch.compiler.reset()  # captured graphs that outlive torch's modules print errors when the interpreter ends
    if dist.is_initialized() and not failed and "last_value" not in vars(sys):
        dist.destroy_process_group()
