"""Custom `torch.autograd.Function`s on deferred tensors: each is recorded as one operation, its backward with it.

What is inside is not looked into: a loss with such a function is computed over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pfeife_accelerate.capture.recording import refused
from pfeife_accelerate.compat import FakeTensor


class CustomFunction:
    """`cls.apply` as a function that can be recorded; equal for equal classes."""

    def __init__(self, cls: type, apply: Callable[..., Any]) -> None:
        self.cls = cls
        self._apply = apply
        self.__module__ = str(cls.__module__)
        self.__name__ = cls.__name__
        self.__qualname__ = f"{cls.__qualname__} {id(cls)}"  # classes made by one function have one name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and self.cls is other.cls

    def __hash__(self) -> int:
        return hash(self.cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it. On fake tensors any failure means that it needs the data."""
        if not any(isinstance(arg, FakeTensor) for arg in args):
            return self._checked(args, kwargs)
        try:
            return self._apply(self.cls, *args, **kwargs)
        except Exception as error:  # whatever its code trips over: `.numpy()`, an extension, a branch on a value
            raise NotImplementedError(f"{self.__name__} needs real tensors") from error

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        result = self._apply(self.cls, *args, **kwargs)
        if before != [tensor._version for tensor in tensors]:
            why = "it changes its argument in place: computing the value again would change it again"
            raise refused(self, why, ("let its forward return a new tensor",))
        return result


def hides_its_backward(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], is_deferred: Callable[[Any], bool]
) -> bool:
    """Whether applying the function to these arguments would make a gradient that recording its inside would lose."""
    given = (*args, *kwargs.values())
    if not any(is_deferred(item) for item in given) or not torch.is_grad_enabled():
        return False
    if cls.__module__ == "torch.utils.checkpoint":  # its backward gives gradients to tensors that it was not passed
        return False
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in given)
