"""Calls of a model under capture: the graph, this call's arguments, and the structure of what the model returns.

The model's own `forward` is compiled with a backend that computes nothing, on fake parameters; see `backend` and
`fakes`. Where Dynamo breaks its graph, the pieces are joined; see `stitch`.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from pfeife_accelerate.capture.arguments import BatchRules, CallArguments, doubts, open_sizes
from pfeife_accelerate.capture.backend import CallRecorder, PieceCall
from pfeife_accelerate.capture.eager_ops import EagerOp, OperationRecorder
from pfeife_accelerate.capture.failure import CaptureFailure, refused
from pfeife_accelerate.capture.fakes import FakeState, is_fake
from pfeife_accelerate.capture.graph import CapturedGraph, bind_symbols
from pfeife_accelerate.capture.inputs import InputLink, Inputs
from pfeife_accelerate.capture.side_effects import Snapshot
from pfeife_accelerate.capture.stitch import StitchCache, stitch
from pfeife_accelerate.capture.structure import MAX_DEPTH, map_tensors, tensors_of
from pfeife_accelerate.capture.timeline import NotStitched, Timeline, TimelineReader
from pfeife_accelerate.compat import dynamo_limits, is_capture_limit, num_graph_breaks, reads_values
from pfeife_accelerate.compat_dynamo import forget_variants_of
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.log import get_logger, warn_once

MAX_VARIANTS = 64
_LOG = get_logger(__name__)
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedCall:
    """One call: its graph, the graph's arguments, the values of its size symbols, and the returned structure."""

    graph: CapturedGraph
    arguments: tuple[Any, ...]
    bindings: Mapping[Any, int]
    structure: Any
    fakes: Mapping[int, int]
    is_one_graph: bool
    """Whether Dynamo captured the call whole."""
    links: tuple[InputLink, ...] = ()
    versions: tuple[tuple[torch.Tensor, int], ...] = ()
    """The script's tensors among the arguments, and how often they had been changed in place."""
    doubts: tuple[str, ...] = ()
    """What was assumed of the batch, where that was not certain."""

    def outputs_with(self, value_of: Callable[[int], Any], *, half_to_float: object = None) -> Any:
        """The returned structure with `value_of(i)` in place of graph output i."""

        def replace(item: Any) -> Any:
            index = self.fakes.get(id(item))
            if index is None:
                return item
            value = value_of(index)
            return value.float() if half_to_float and value.dtype in (torch.float16, torch.bfloat16) else value

        return map_tensors(replace, self.structure, MAX_DEPTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
    """What was noted of one call, and the structure that it returned, with the tensors in it."""

    calls: tuple[PieceCall, ...]
    ops: tuple[EagerOp, ...]
    refused: str | None
    structure: Any
    returned: tuple[torch.Tensor, ...]

    @property
    def is_one_graph(self) -> bool:
        """Whether Dynamo captured the call whole."""
        if len(self.calls) != 1:
            return False
        made = {id(output) for output in self.calls[0].outputs}
        return all(id(tensor) in made or not is_fake(tensor) for tensor in self.returned)


Peek = Callable[[CapturedGraph, tuple[Any, ...], Mapping[Any, int], "tuple[str, torch.dtype] | None"], torch.Tensor]


def _nobody_computes(*_: Any) -> torch.Tensor:
    raise NotStitched("it reads the value of a tensor")


class ModelCapture:
    """Captures calls of one model; equal calls cost Dynamo's guards alone."""

    def __init__(
        self, module: nn.Module, device: torch.device, batch_dims: tuple[tuple[str, int | None], ...] = ()
    ) -> None:
        self.module = module
        self.device = device
        self.original_forward: Callable[..., Any] = module.forward
        self._declared = batch_dims
        self._rules: BatchRules | None = None
        self._proved: set[tuple[bool, bool]] = set()
        self._before: Snapshot | None = None
        self._notes_operations = False
        self.peek: Peek = _nobody_computes
        """Computes the only output of a graph, for the model's Python to read."""
        self._answers: list[torch.Tensor] = []
        self._repeated: Iterator[torch.Tensor] | None = None
        self._prepare()

    def _prepare(self) -> None:
        self._fakes = FakeState(self.module, self.device)
        self._states = self._fakes.fake_states()
        self._recorder = CallRecorder(self._fakes.mode)
        self._stitched = StitchCache()
        self._compile()

    def _compile(self) -> None:
        forward = self.original_forward

        def captured_forward(tied: tuple[tuple[torch.Tensor, ...], ...], /, *args: Any, **kwargs: Any) -> Any:
            sizes = [tensor.shape[dim] for dim, tensors in enumerate(tied) for tensor in tensors]
            for size in sizes:
                if size != sizes[0]:  # from this Dynamo learns that they are one and the same number
                    raise ValueError(f"arguments with {size} and {sizes[0]} rows")
            return forward(*args, **kwargs)

        # Dynamo counts variants by code object, and functions made in one place share theirs. By name and line it
        # remembers which numbers have differed, and takes these for symbols: another model's must not count.
        own = captured_forward.__code__.replace(co_name=f"captured_forward_{next(_NUMBERS)}")
        function = types.FunctionType(own, globals(), own.co_name, None, captured_forward.__closure__)
        self._compiled, self._code = torch.compile(function, backend=self._recorder), own

    def states(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by canonical name."""
        return self._fakes.real_states()

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: tuple[str, torch.dtype] | None
    ) -> CapturedCall:
        """Capture one call.

        Raises: CaptureFailure if that is impossible.
        """
        if any(isinstance(module, nn.RNNBase) for module in self.module.modules()):
            raise CaptureFailure(refused(self.module, None, None, num_graph_breaks()))
        if not self._fakes.matches():
            self._prepare()
        if self._rules is None:
            self._rules = BatchRules(self.original_forward, self._declared)
        self._inputs = Inputs()  # of this call
        args, kwargs = self._inputs.plain(args, kwargs)
        given = self._rules.read(args, kwargs)
        # Calls of a kind that has succeeded as one graph run none of the model's Python on fakes.
        kind = (torch.is_grad_enabled(), self.module.training)
        self._before = None if kind in self._proved else Snapshot(self.module, self.device)
        try:
            return self._best(given, autocast)
        except CaptureFailure as failure:
            self.undo()
            if not is_capture_limit(failure.cause):
                raise
        self._forget_variants()
        try:
            return self._best(given, autocast)
        except CaptureFailure:
            self.undo()
            raise

    def _best(self, given: CallArguments, autocast: tuple[str, torch.dtype] | None) -> CapturedCall:
        """The call as it is, or, where its batch cannot be divided, with arguments told to have equally many rows.

        Each argument's number of rows is a symbol of its own unless the model's code compares them, and a reshape of
        one by the rows of another seems to mix the rows.
        """
        assert self._rules is not None
        as_it_is = self._captured(given, autocast)
        names = self._rules.untried(open_sizes(given, as_it_is.graph, as_it_is.arguments))
        kind = (torch.is_grad_enabled(), self.module.training)
        if not names:
            self._proved |= {kind} if as_it_is.is_one_graph else set()
            return as_it_is
        if self._before is None:
            self._proved.discard(kind)  # the next such call can be taken back, and therefore tried
            return as_it_is
        after, untied = Snapshot(self.module, self.device), (self._compiled, self._code)
        self.undo()
        self._compile()
        try:
            tied = self._captured(given.with_tied(names), autocast)
        except CaptureFailure as failure:
            _LOG.info("with as many rows in each of %s it cannot be captured: %s", sorted(names), failure)
            self._rules.tried(names, helps=False)
        else:
            if self._rules.tried(names, helps=tied.graph.refusal is None):
                forget_variants_of(untied[1])  # nobody calls it any more
                return tied
        forget_variants_of(self._code)
        self._compiled, self._code = untied
        after.restore()
        return as_it_is

    def _forget_variants(self) -> None:
        warn_once(
            _LOG,
            "too many variants",
            f"{type(self.module).__name__} has been captured in more than {MAX_VARIANTS} variants (shapes, modes, "
            "values of arguments); all are forgotten and captured anew when they are needed. Each capture takes as "
            "long as the first one: pad lengths to fewer different sizes, and pass changing numbers as tensors.",
        )
        torch.compiler.reset()
        self._prepare()

    def undo(self) -> None:
        """Take back what the model's Python has changed in the last call."""
        if self._before is not None:
            self._before.restore()

    def _captured(self, given: CallArguments, autocast: tuple[str, torch.dtype] | None) -> CapturedCall:
        breaks_before = num_graph_breaks()
        mode = torch.autocast(*autocast) if autocast else nullcontext()
        with dynamo_limits(MAX_VARIANTS), self._fakes.in_place(), mode:
            try:
                self._now, self._answers = (given, autocast), []
                record = self._first_record(given)
                for name, twin, value in self._fakes.assigned():
                    if not any(call.returns_changed(value, twin) for call in record.calls):
                        raise NotStitched(f"the forward pass assigns a new tensor to {name}")
                return self._understood(given, record)
            except PfeifeError:
                raise
            except NotStitched as error:
                raise CaptureFailure(refused(self.module, str(error), None, breaks_before)) from error
            except Exception as error:
                refusal = refused(self.module, None, error, breaks_before)
                raise CaptureFailure(refusal, error, has_begun=bool(self._recorder.calls)) from error
            finally:
                self._recorder.calls.clear()

    def _first_record(self, given: CallArguments) -> _Record:
        try:
            record = self._record(given)
        except Exception as error:  # anything else is the caller's
            if self._notes_operations or not reads_values(error):
                raise
        else:
            if self._notes_operations or record.is_one_graph:
                return record
        self._start_noting()
        return self._record(given)

    def _value_of(self, fake: torch.Tensor) -> torch.Tensor:
        """The real tensor for a fake whose value the model's Python asks for."""
        if id(fake) in self._fakes.name_of:
            return self.states()[self._fakes.name_of[id(fake)]].detach()
        if self._repeated is not None:
            return next(self._repeated)
        given, autocast = self._now
        recorder = self._recorder
        assert recorder.operations is not None
        reader = TimelineReader(self._fakes.name_of, self._inputs.differentiable)
        timeline = reader.read(tuple(recorder.calls), tuple(recorder.operations.ops), (fake,))
        key = _key(timeline, given)
        stitched = self._stitched.find(key, timeline, self._states)
        if stitched is None:
            stitched = stitch(timeline, self._states, given, None)
            self._stitched.keep(key, stitched)
        arguments = stitched.arguments(timeline, self._states)
        self._answers.append(self.peek(stitched.graph, arguments, bind_symbols(stitched.graph, arguments), autocast))
        return self._answers[-1]

    def _record(self, given: CallArguments) -> _Record:
        """Run the model's Python on fakes."""
        recorder = self._recorder
        recorder.calls.clear()
        recorder.operations = OperationRecorder(self._value_of) if self._notes_operations else None
        with recorder.operations if recorder.operations is not None else nullcontext():
            structure = self._compiled(given.tied, *given.args, **given.kwargs)
        returned = tuple(tensors_of(structure))
        operations = recorder.operations
        return _Record(
            calls=tuple(recorder.calls),
            ops=() if operations is None else tuple(operations.ops),
            refused=None if operations is None else operations.refused,
            structure=structure,
            returned=returned,
        )

    def _start_noting(self) -> None:
        """From now on, note what runs outside the captured pieces: it costs time, and few models need it."""
        self._notes_operations = True
        self.undo()
        self._compile()

    def _timeline(self, record: _Record) -> Timeline:
        if record.refused is not None:
            raise NotStitched(record.refused)
        reader = TimelineReader(self._fakes.name_of, self._inputs.differentiable)
        return reader.read(record.calls, record.ops, record.returned)

    def _understood(self, given: CallArguments, record: _Record) -> CapturedCall:
        if record.is_one_graph:
            (only,) = record.calls
            graph = only.piece.whole(only.args, self._fakes.name_of, given.batch_dims)
            arguments, fakes = only.args, {id(fake): i for i, fake in enumerate(only.outputs)}
        else:
            timeline = self._timeline(record)
            stitched = self._stitched.find(_key(timeline, given), timeline, self._states)
            if stitched is None:
                record, indivisible = self._general(given, record)
                timeline = self._timeline(record)
                stitched = stitch(timeline, self._states, given, indivisible)
                self._stitched.keep(_key(timeline, given), stitched)
            graph, arguments = stitched.graph, stitched.arguments(timeline, self._states)
            fakes = {fake: i for i, fake in enumerate(timeline.result_ids)}
        return CapturedCall(
            graph=graph,
            arguments=arguments,
            bindings=bind_symbols(graph, arguments),
            structure=record.structure,
            is_one_graph=record.is_one_graph,
            fakes=fakes,
            doubts=doubts(given, graph, arguments),
            links=self._inputs.links(arguments),
            versions=tuple(self._inputs.versions),
        )

    def _general(self, given: CallArguments, record: _Record) -> tuple[_Record, str | None]:
        """A record of the call that holds for any number of rows; if there is none, this one, and why not.

        Found out by trying: Python between the pieces may have read the number of rows, which Dynamo then holds for a
        constant. Where it has merely kept an older variant for this size, the next call takes the newer one.
        """
        timeline = self._timeline(record)
        why = timeline.fixed_by_python(given.rows)
        if why is not None or given.rows < 2 or not given.batch_dims:
            return record, why
        longer = given.with_more_rows()
        try:
            pattern = self._again(longer)[1]
            if timeline.pattern(given.batch_dims) == pattern:
                return record, None
            again, newer = self._again(given)
            if newer == pattern:
                return again, None
        except Exception as error:  # whatever it is, it did not happen with the batch as it is
            _LOG.info("a batch of another size cannot be captured: %s", error)
        return record, "Python code between the captured pieces depends on the number of rows"

    def _again(self, given: CallArguments) -> tuple[_Record, tuple[Any, ...]]:
        """Another record, and its timeline's pattern; what the model's Python changes is left as it is now."""
        after = Snapshot(self.module, self.device)
        self.undo()
        self._repeated = iter(list(self._answers))
        try:
            record = self._record(given)
            return record, self._timeline(record).pattern(given.batch_dims)
        finally:
            self._repeated = None
            after.restore()


def _key(timeline: Timeline, given: CallArguments) -> tuple[Any, ...]:
    return (timeline.key(given.batch_dims), given.tied_names)
