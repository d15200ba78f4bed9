"""One `backward` of the script: which schedules it takes, in which order, on all ranks alike.

A loss over one call that separates over micro-batches takes the planned schedule. Any other takes the exact order: all
forwards, the loss over the whole batch, all backwards, from the last call to the first. Gradients go on into a call's
arguments where these came from other calls or from modules outside the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pfeife_accelerate.capture.deferred import DeferredTensor, Leaf
from pfeife_accelerate.capture.expression import Expression, extract
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.session.call import Call, InputLink, Progress, promised
from pfeife_accelerate.session.losses import whole_batch_loss
from pfeife_accelerate.session.outside import OutsideTensors
from pfeife_accelerate.session.programs import Run

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session
    from pfeife_accelerate.session.model import PipelinedModel


def backward(session: Session, loss: DeferredTensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
    """What `loss.backward()` does; afterwards every own parameter has its gradient."""
    _Descent(session, extract(loss), gradient).run(retain_graph)


class _Descent:
    def __init__(self, session: Session, expression: Expression, gradient: torch.Tensor | None) -> None:
        self.session = session
        self.conductor = session.conductor
        self.expression = expression
        self.gradient = gradient
        self.outside = OutsideTensors(expression)
        self.direct = _calls_of(expression)
        self.paths: dict[InputLink, _Path] = {}
        self.calls = self._behind()
        self.requests: dict[Call, int] = {}

    def _behind(self) -> list[Call]:
        """All calls that a gradient comes to, the latest first; a call's arguments come from earlier ones."""
        found: dict[int, Call] = {call.number: call for call in self.direct}
        waiting = list(self.direct)
        while waiting:
            for link in waiting.pop().links:
                if isinstance(link.source, DeferredTensor):
                    path = self.paths[link] = _Path(link)
                    new = [call for call in path.calls if call.number not in found]
                    found.update({call.number: call for call in new})
                    waiting += new
        return [found[number] for number in sorted(found, reverse=True)]

    def run(self, retain_graph: bool) -> None:
        for call in self.calls:
            self.requests[call] = call.ask(retain=retain_graph)
            self.conductor.open_calls.asked(call)
        self._expect_means()
        wrong = self._drop_wrong_guesses() if self.conductor.leads else []
        if self.conductor.leads:
            self._lead()
        self._follow()
        if not self.conductor.leads and (wrong := self._drop_wrong_guesses()):
            self._follow()
        for call in self.calls:
            call.resolver.gradients.release(call, self.requests[call])
        self._go_on_outside(retain_graph)
        self._promise()
        if len(self.direct) == 1 and self.gradient is None:
            self.direct[0].resolver.foresight.learn(self.expression, was_wrong=bool(wrong))
        for model in {id(call.resolver): call.resolver for call in self.calls}.values():
            if self._synchronises(model):
                model.gradients.replicas.finish(self.session)
            model.own_gradients.note_backward(self.conductor.last_number)
            model.elsewhere.note_backward()
        self.session.tick()  # what others ask for from here on waits for it

    def _expect_means(self) -> None:
        """Means over pipelines may start during the schedule if nothing else adds to the gradients."""
        call = self.calls[0]
        is_all = len(self.calls) == 1 and not call.links and self.outside.is_empty
        if is_all and self.session.mesh.num_pipelines > 1 and self._synchronises(call.resolver):
            call.resolver.gradients.replicas.expect(call, self.requests[call])

    def _synchronises(self, model: PipelinedModel) -> bool:
        return model.synchronises and self.session.synchronises()

    def _follow(self) -> None:
        for call in self.calls:
            self.conductor.follow(call, Progress.DONE, self.session.run)

    def _drop_wrong_guesses(self) -> list[Call]:
        """Calls that were guessed to have another loss; what was computed for it is dropped. All ranks agree on it."""
        wrong = []
        for call in self.calls:
            guess, call.guess = call.guess, None
            if guess is None or call.progress is not Progress.DONE:
                continue
            if self.direct != [call] or self.gradient is not None or not guess.fits(self.expression):
                call.reopen(self.requests[call])
                wrong.append(call)
        return wrong

    def _promise(self) -> None:
        scalars = self.direct[-1].scalars
        if scalars is None or len(scalars) != len(self.expression.scalars):
            raise PfeifeError(
                id="PF505",
                what="ranks of the pipeline recorded different losses in one step",
                why=f"the last stage's rank computed {len(scalars or ())} one-element values on the way to its loss, "
                f"and this rank's script has {len(self.expression.scalars)}",
                hints=("write the same loss on all processes; only logging may be done on one",),
            )
        promise(self.expression, scalars)

    # -------------------------------------------------------------------------------------------- the leading rank

    def _lead(self) -> None:
        gradients: dict[Call, dict[str, torch.Tensor]] = {call: {} for call in self.calls}
        scalars: list[torch.Tensor] | None = None
        if not self._is_planned():
            scalars = self._whole_batch(gradients)
        for call in self.calls:
            if call.progress is Progress.PENDING:
                call.resolver.start(call, Run.FORWARD, request=self.requests[call])
            if call.progress is Progress.FORWARDED:
                self._start_backward(call, gradients[call], scalars)
            for link in call.links:
                if link in self.paths and link.index in call.input_gradients:
                    for leaf, gradient in self.paths[link].gradients(call.input_gradients[link.index]):
                        _add(gradients[_call_of(leaf)], leaf.value, gradient)

    def _is_planned(self) -> bool:
        """Whether the planned schedule has computed the loss, or computes it now."""
        call = self.direct[0]
        if len(self.direct) > 1:
            return False
        if call.progress is Progress.PENDING:
            call.resolver.start_planned(call, self.expression, self.outside.constants, self.gradient)
        return call.progress is Progress.DONE

    def _whole_batch(self, gradients: dict[Call, dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """The loss over the whole batch, once all forwards have run."""
        for call in self.direct:
            if call.progress is Progress.PENDING:
                call.resolver.start(call, Run.FORWARD, request=self.requests[call])
        leaves = [_call_of(leaf).values[leaf.value] for leaf in self.expression.leaf_info]
        scalars, found = whole_batch_loss(self.expression, self.outside.constants, leaves, self.gradient)
        for leaf, gradient in zip(self.expression.leaf_info, found, strict=True):
            if gradient is not None:
                _add(gradients[_call_of(leaf)], leaf.value, gradient)
        return scalars

    def _start_backward(
        self, call: Call, gradients: dict[str, torch.Tensor], scalars: list[torch.Tensor] | None
    ) -> None:
        known = scalars if scalars is not None else self.direct[0].scalar_tensors()
        call.resolver.start(
            call, Run.BACKWARD, call.loss_values, request=self.requests[call], gradients=gradients, scalars=known
        )

    # -------------------------------------------------------------------------------------------- beyond the calls

    def _go_on_outside(self, retain_graph: bool) -> None:
        """On every rank: through trainable tensors of the loss, and through arguments made by modules of the script."""
        self.outside.go_back(self.session)
        for path in self.paths.values():
            path.outside.go_back(self.session)
        links = [(link, call) for call in self.calls for link in call.links if link not in self.paths]
        found = [
            (link.source, call.input_gradients[link.index])
            for link, call in links
            if link.index in call.input_gradients
        ]
        if found:
            sources, gradients = zip(*found, strict=True)
            torch.autograd.backward(sources, gradients, retain_graph=retain_graph)


class _Path:
    """From a call's argument back to the values of other calls that it was made from."""

    def __init__(self, link: InputLink) -> None:
        assert isinstance(link.source, DeferredTensor)
        self._expression = extract(link.source)
        self.outside = OutsideTensors(self._expression)
        self.calls = _calls_of(self._expression)

    def gradients(self, gradient: torch.Tensor) -> list[tuple[Leaf, torch.Tensor]]:
        """Gradients of these values, on the leading rank."""
        leaves = [_call_of(leaf).values[leaf.value] for leaf in self._expression.leaf_info]
        _, found = whole_batch_loss(self._expression, self.outside.constants, leaves, gradient)
        return [(leaf, g) for leaf, g in zip(self._expression.leaf_info, found, strict=True) if g is not None]


def promise(expression: Expression, scalars: Sequence[float]) -> None:
    """Let the one-element values of an expression be known without computing."""
    for value, (_, record) in zip(scalars, expression.scalars, strict=True):
        if record.value is None and record.fake.numel() == 1:
            record.promise = promised(value, record)


def _calls_of(expression: Expression) -> list[Call]:
    return list({id(leaf.call): _call_of(leaf) for leaf in expression.leaf_info}.values())


def _call_of(leaf: Leaf) -> Call:
    assert isinstance(leaf.call, Call)
    return leaf.call


def _add(gradients: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> None:
    gradients[name] = gradients[name] + gradient if name in gradients else gradient
