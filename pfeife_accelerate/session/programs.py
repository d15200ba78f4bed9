"""Rank programs out of a plan: stages, messages and lowered action lists, one for each kind of schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

from torch import fx

from pfeife_accelerate.capture.compiled import Compilation
from pfeife_accelerate.capture.graph import CapturedGraph, Modes
from pfeife_accelerate.capture.split import StagedGraph, split
from pfeife_accelerate.capture.stage import make_stage
from pfeife_accelerate.errors import InternalError, assert_never
from pfeife_accelerate.ir.actions import ActionKind, Schedule
from pfeife_accelerate.ir.program import StageProgram
from pfeife_accelerate.log import get_logger, warn_once
from pfeife_accelerate.runtime.step import MessageValues, RankProgram
from pfeife_accelerate.schedule import (
    Message,
    backward_only,
    by_first_reader,
    for_microbatches,
    forward_only,
    in_sequence,
    lower,
)

_LOG = get_logger(__name__)


class Run(str, Enum):
    """The kinds of schedule that a step consists of."""

    PLANNED = "planned"  #: forwards and backwards in the planned order, the loss in between
    FORWARD = "forward"  #: first half of the exact order
    BACKWARD = "backward"  #: its second half
    EVALUATE = "evaluate"  #: forwards alone, nothing kept for a backward
    PLAN = "plan"  #: nothing yet: all ranks' scripts have made the call, and the model is to be planned
    ALONE = "alone"  #: nothing: only this rank's script has made the call


class ProgramCache:
    """Programs of one model on one rank, made when first needed."""

    def __init__(
        self,
        order: Schedule,
        rank: int,
        recompute: Collection[int] = (),
        compilation: Compilation | None = None,
    ) -> None:
        self.order = order
        self._recompute = frozenset(recompute)
        kinds = {action.kind for actions in order.per_rank for action in actions}
        self._puts_off = ActionKind.WEIGHT_GRADIENT in kinds
        self._compilation = compilation
        if self._puts_off and compilation is not None:
            self._puts_off = False
            warn_once(
                _LOG,
                "compiled halves",
                "compiled stages compute the gradients of weights together with those of values, although the plan "
                "splits the backward pass (compile: none keeps them apart)",
            )
        self._stages: dict[tuple[Any, ...], StageProgram] = {}
        self.stage_ranks = order.stage_ranks
        self.rank = rank
        self._staged: dict[tuple[Any, ...], StagedGraph] = {}
        self._programs: dict[tuple[int, tuple[str, ...], tuple[str, ...], Run, int], RankProgram] = {}
        self._graphs: dict[int, CapturedGraph] = {}

    def staged(
        self, graph: CapturedGraph, cuts: tuple[int, ...], needed: tuple[str, ...], copied: tuple[str, ...] = ()
    ) -> StagedGraph:
        """The graph in stages that make the needed values; each stage computes those that are copied."""
        self._graphs[id(graph)] = graph  # keeps the id from being used again
        key = (id(graph), cuts, needed, copied)
        if key not in self._staged:
            self._staged[key] = split(
                graph,
                cuts,
                needed,
                copied=copied,
                puts_off=self._puts_off,
                recompute=self._recompute,
                make=self._stage,
            )
        return self._staged[key]

    def _stage(
        self,
        graph: CapturedGraph,
        index: int,
        nodes: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        begin: Modes,
        end: Modes,
        anew: Sequence[fx.Node],
        **how: bool,
    ) -> StageProgram:
        """A stage, made once: most do not depend on which values are needed in the end, and compiling takes long."""
        key = (graph, index, tuple(nodes), tuple(outputs), begin, end, tuple(anew))
        if key not in self._stages:
            self._stages[key] = make_stage(
                graph, index, nodes, outputs, begin, end, anew, compilation=self._compilation, **how
            )
        return self._stages[key]

    def program(
        self,
        staged: StagedGraph,
        needed: tuple[str, ...],
        loss_values: tuple[str, ...],
        run: Run,
        num_microbatches: int,
    ) -> RankProgram:
        """This rank's program; `loss_values` are delivered to the last stage's rank."""
        key = (id(staged), needed, loss_values, run, num_microbatches)
        if key not in self._programs:
            self._programs[key] = self._make(staged, loss_values, run, num_microbatches)
        return self._programs[key]

    def _make(self, staged: StagedGraph, loss_values: tuple[str, ...], run: Run, num_microbatches: int) -> RankProgram:
        readers = _readers(staged, loss_values, len(self.stage_ranks) - 1)
        messages, contents = self._messages(staged, readers)
        schedule = for_microbatches(self.order, num_microbatches)
        if staged.graph.changes_buffers:  # as accumulation over the micro-batches would change it
            schedule = in_sequence(schedule)
        match run:
            case Run.PLANNED:
                pass
            case Run.FORWARD | Run.EVALUATE:
                schedule = forward_only(schedule)
            case Run.BACKWARD:
                schedule = backward_only(schedule)
            case Run.ALONE | Run.PLAN:
                raise InternalError(id="PF432", what=f"nothing is scheduled for {run.value!r}")
            case _:
                assert_never(run)
        lowered = lower(schedule, messages)
        own = {name: tuple(s for s in stages if self.stage_ranks[s] == self.rank) for name, stages in readers.items()}
        return RankProgram(
            rank=self.rank,
            actions=lowered.per_rank[self.rank],
            stages={s.index: s for s in staged.stages if self.stage_ranks[s.index] == self.rank},
            stage_ranks=self.stage_ranks,
            messages=contents,
            readers={name: stages for name, stages in own.items() if stages},
            loss_values=loss_values,
        )

    def _messages(
        self, staged: StagedGraph, readers: dict[str, tuple[int, ...]]
    ) -> tuple[tuple[Message, ...], dict[tuple[int, int], MessageValues]]:
        together: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
        position = staged.graph.position  # messages leave as the planner has them leave: in the order of the operations
        for name, stages in sorted(readers.items(), key=lambda item: position[staged.graph.node_of[item[0]]]):
            for reader, own in by_first_reader(stages, self.stage_ranks).items():
                together.setdefault((staged.producer_of[name], reader), {})[name] = own
        messages: list[Message] = []
        contents: dict[tuple[int, int], MessageValues] = {}
        numbers: Counter[tuple[int, int]] = Counter()  # values so far that a stage gives to a rank
        for (producer, reader), values in sorted(together.items(), key=lambda item: item[0][0]):
            names, rank = tuple(sorted(values)), self.stage_ranks[reader]
            with_grad = tuple(n for n in names if staged.graph.node_of[n].meta["example_value"].requires_grad)
            consumers = tuple(sorted(set().union(*values.values())))
            messages.append(
                Message(
                    producer_stage=producer, consumer_rank=rank, consumer_stages=consumers, has_grad=bool(with_grad)
                )
            )
            contents[producer, reader] = MessageValues(
                values=names, with_grad=with_grad, first_number=numbers[producer, rank]
            )
            numbers[producer, rank] += len(names)
        return tuple(messages), contents


def _readers(staged: StagedGraph, loss_values: Sequence[str], loss_stage: int) -> dict[str, tuple[int, ...]]:
    """Who reads each value; the loss counts as a part of the last stage."""
    readers = {name: set(stages) for name, stages in staged.readers_of.items()}
    for name in loss_values:
        if staged.producer_of[name] != loss_stage:
            readers[name].add(loss_stage)
    return {name: tuple(sorted(stages)) for name, stages in readers.items() if stages}
