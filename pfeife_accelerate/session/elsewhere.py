"""Values of a model's parameters that live on other ranks, as this rank's script should see them.

Models: values fetched from their owners one-sidedly, ahead while a script goes through the parameters in order; changes
that the script makes, which the owner makes to its own copy by the same line: they last until the
model runs, an optimizer steps or all ranks meet: from then on the owner's copy is the one that counts.
Ignores: a script that changes its own parameters by hand, outside an optimizer, while a slower rank still reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from pfeife_accelerate.capture.elsewhere import ParameterElsewhere
from pfeife_accelerate.capture.elsewhere_place import Edit, Place
from pfeife_accelerate.capture.script import script_line
from pfeife_accelerate.compat import disable_torch_function
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.session.whole import fetch_states

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel

_AHEAD = 32
_AHEAD_BYTES = 1 << 28
_MAX_SKIPPED = 8  #: frozen ones, say, in a loop over the trainable parameters


@dataclass
class _Local:
    """What this rank's script has made of one parameter since the last tick."""

    value: torch.Tensor | None = None
    """In place of the owner's; None: the owner's."""
    edits: list[Edit] = field(default_factory=list)
    """To be made to the owner's value, which may or may not have them already."""
    unknown_since: str | None = None
    """The change after which only the owner knows the value."""


def count_gradient_edit(parameters: Iterable[torch.Tensor], times: int = 1) -> None:
    """All owners change their gradients so often, by a function that is not called on the others' stubs."""
    for parameter in parameters:
        if isinstance(parameter, ParameterElsewhere):
            parameter.place.edits += times


class ValuesElsewhere:
    """The `Source` of one model's parameters elsewhere."""

    def __init__(self, model: PipelinedModel) -> None:
        self.model = model
        self.device = model.device
        self.reads_later = False
        self._parameters: dict[str, ParameterElsewhere] = {}
        self._order: dict[int, list[str]] = {}
        self._position: dict[str, int] = {}
        self._last_read: dict[int, int] = {}
        self._ahead: dict[str, torch.Tensor] = {}
        self._local: dict[str, _Local] = {}
        self._tick = (-1, -1)

    @property
    def hides_gradients(self) -> bool:
        """Inside an optimizer's step."""
        return self.model.session.num_steps_under_way > 0

    def give_up(self, name: str, parameter: nn.Parameter) -> None:
        """Free a parameter's memory and keep its Python object: names, groups, attributes stay as they are."""
        if not isinstance(parameter, ParameterElsewhere):
            parameter.grad = None
            try:
                torch.utils.swap_tensors(parameter, ParameterElsewhere.of(parameter, Place(name, self)))
            except RuntimeError as error:
                raise _in_use(name) from error
        assert isinstance(parameter, ParameterElsewhere)
        self._parameters[name] = parameter
        order = self._order.setdefault(self.model.placement.owner(name), [])
        self._position[name] = len(order)
        order.append(name)

    def note_backward(self) -> None:
        """The owners' trainable parameters have gradients now."""
        with disable_torch_function():
            for parameter in self._parameters.values():
                if parameter.requires_grad:
                    parameter.place.note_backward()

    def rank_of(self, name: str) -> int:
        """The rank of the launch that owns the parameter."""
        mesh = self.model.session.mesh
        return mesh.pipeline_index * mesh.pipeline_size + self.model.placement.owner(name)

    # -------------------------------------------------------------------------------------------- reading

    def value(self, name: str) -> torch.Tensor:
        """A copy of the value on the device, without history."""
        with torch.inference_mode(False), torch.no_grad():
            local = self._local_of(name)
            own = None if local is None else local.value
            value = self._fetched(name) if own is None else own
            value = value.to(self.device, self._parameters[name].dtype, copy=own is not None)
            for edit in [] if local is None else local.edits:
                edit(value)
            return value

    def gradient(self, name: str, edits: int) -> torch.Tensor:
        """A copy of the gradient on the device, from its owner."""
        session = self.model.session
        own = self.model.own_gradients
        key = f"{session.models.index(self.model)}/{name}/{own.num_backwards}/{edits}"
        with session.control.busy():
            own.keep_copies()
        with torch.inference_mode(False), torch.no_grad():
            value = session.control.fetch(self.rank_of(name), "gradient", key, clock=session.control.clock)
            return value.to(self.device, self._parameters[name].dtype)

    def values(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Parameters and buffers elsewhere, in as few requests as possible; not all on the device."""
        wanted = list(dict.fromkeys(names))
        own = {name: self.value(name) for name in wanted if self._local_of(name) is not None}
        return {**fetch_states(self.model, [name for name in wanted if name not in own]), **own}

    def _local_of(self, name: str) -> _Local | None:
        self._keep_up()
        local = self._local.get(name)
        if local is not None and local.unknown_since is not None:
            raise PfeifeError(
                id="PF527",
                what=f"the value of {name!r} is not known on this rank until all ranks meet again",
                where=script_line(),
                why=f"it lives on rank {self.rank_of(name)}, which changes it at a moment of its own: "
                f"{local.unknown_since}",
                hints=(
                    "read it after the next optimizer.step() or accelerator.wait_for_everyone()",
                    "change it by p.copy_(new_value): that is known on all ranks",
                ),
            )
        return local

    def _keep_up(self) -> None:
        session = self.model.session
        tick = session.control.clock, session.num_meetings
        if tick != self._tick:
            self._tick = tick
            self._local.clear()
            self._ahead.clear()

    def _fetched(self, name: str) -> torch.Tensor:
        owner = self.model.placement.owner(name)
        order, index = self._order[owner], self._position[name]
        last = self._last_read.get(owner, -_MAX_SKIPPED)
        self._last_read[owner] = index
        if name not in self._ahead:
            session = self.model.session
            with session.control.busy():
                session.hand_changes.keep_copies(session.models)
            wanted = [name]
            if last < index <= last + _MAX_SKIPPED:
                wanted += self._next(order[index + 1 : index + _AHEAD], self._bytes(name))
            self._ahead.update(fetch_states(self.model, wanted))
        return self._ahead.pop(name)

    def _next(self, names: list[str], num_bytes: int) -> list[str]:
        """Those of the next parameters that are worth fetching along with one that is needed now."""
        found = []
        for name in names:
            num_bytes += self._bytes(name)
            if num_bytes > _AHEAD_BYTES:
                break
            if name not in self._ahead and name not in self._local:
                found.append(name)
        return found

    def _bytes(self, name: str) -> int:
        return self._parameters[name].numel() * self._parameters[name].element_size()

    # -------------------------------------------------------------------------------------------- changing

    def overwrite(self, name: str, value: torch.Tensor) -> None:
        """This is the value on this rank, until the next tick. It is kept in main memory."""
        self._keep_up()
        self._local[name] = _Local(value.to("cpu"))

    def edit(self, name: str, edit: Edit | None, what: str, *, repeatable: bool) -> None:
        """A change of whatever the value is; None: a change that only the owner can make."""
        local = self._changed(name)
        if edit is not None and local.value is not None:
            local.value = self.value(name)
            edit(local.value)
            local.value = local.value.to("cpu")
        elif edit is not None and repeatable:
            local.edits.append(edit)
        else:
            self._local[name] = _Local(unknown_since=what)

    def _changed(self, name: str) -> _Local:
        self._keep_up()
        return self._local.setdefault(name, _Local())


def _in_use(name: str) -> PfeifeError:
    return PfeifeError(
        id="PF529",
        what=f"{name!r} is part of a computation that was made before the model was placed",
        where=script_line(),
        why="at the first call of the model each rank gives up the parameters of the others, and cannot while autograd "
        "or a weak reference holds one",
        hints=("call the model first, and compute with its parameters afterwards",),
    )
