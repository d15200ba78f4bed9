"""A parameter whose data lives on another rank of the pipeline, as the script sees it; its data, and its gradient.

The script keeps its object. Whatever it does with it is answered by `elsewhere_calls`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pfeife_accelerate.capture.elsewhere_calls import answer, set_data, unreadable
from pfeife_accelerate.capture.elsewhere_place import Place, Role, Stub, meta_like
from pfeife_accelerate.capture.script import script_line


class ParameterElsewhere(Stub, nn.Parameter):  # type: ignore[misc]
    """The parameter itself: the script's object, without memory."""

    role = Role.PARAMETER

    @classmethod
    def of(cls, parameter: nn.Parameter, place: Place) -> ParameterElsewhere:
        """A twin to put in the place of a parameter that is given up; it keeps what the script hung on it."""
        twin: ParameterElsewhere = cls(meta_like(parameter), requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        twin.place = place
        return twin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from metadata, read, or change."""
        return answer(func, types, tuple(args), dict(kwargs or {}))

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The data, to be read or written later."""
        data = meta_like(self).as_subclass(DataElsewhere)
        data.place = self.place
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        set_data(self, value)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """None, or a placeholder."""
        place = self.place
        if not place.has_gradient or place.source.hides_gradients:
            return None
        if place.gradient is None:
            place.gradient = meta_like(self).as_subclass(GradientElsewhere)
            place.gradient.place = place
        return place.gradient  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.place.has_gradient = value is not None
        if value is not self.place.gradient:
            self.place.replaced_by = f"`p.grad = ...`, {script_line()}"

    @grad.deleter
    def grad(self) -> None:
        self.place.has_gradient = False

    def _whole(self) -> nn.Parameter:
        return nn.Parameter(self.value(), requires_grad=self.requires_grad)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._whole())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), self._whole())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole().__reduce_ex__(protocol)


class DataElsewhere(Stub, torch.Tensor):  # type: ignore[misc]
    """A parameter's `.data`: reads fetch when they happen, writes reach the parameter."""

    role = Role.DATA

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from metadata, read, or change."""
        return answer(func, types, tuple(args), dict(kwargs or {}))

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Itself."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        set_data(self, value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.value())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.value())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)


class GradientElsewhere(Stub, torch.Tensor):  # type: ignore[misc]
    """The gradient of a parameter elsewhere: edits are counted, which the owner makes to its own; reads fetch."""

    role = Role.GRADIENT
    counts_edits = True
    """Whether an edit on the owner is seen there: through `.data` it is not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from metadata, read, or count a change."""
        return answer(func, types, tuple(args), dict(kwargs or {}))

    def value(self) -> torch.Tensor:
        """The gradient's value now, a copy."""
        if self.place.replaced_by is not None:
            raise unreadable(self)
        return self.place.source.gradient(self.place.name, self.place.edits)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same, for edits that autograd does not see."""
        data = meta_like(self).as_subclass(GradientElsewhere)
        data.place, data.counts_edits = self.place, False
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not (isinstance(value, Stub) and value.place is self.place):
            self.place.replaced_by = f"`grad.data = ...`, {script_line()}"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)
