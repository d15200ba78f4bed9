"""`torch.autograd.Function.apply` on the outputs of a pipelined model; on real tensors it goes its normal way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def apply(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """Hook of `torch.autograd.Function.apply`, which torch functions' own interception does not reach."""
    # This module is loaded together with torch; the capture loads accelerate, whose own seams wait for these.
    from pfeife_accelerate.capture.deferred import apply_custom_function

    return apply_custom_function(original, cls, args, kwargs)
