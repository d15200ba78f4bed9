"""Where all parts meet: the process's session (`lifecycle`) and the pipelined models in it (`model`)."""

from pfeife_accelerate.session.elsewhere import count_gradient_edit
from pfeife_accelerate.session.lifecycle import Session, current, place, start, stop, validate_world

__all__ = ["Session", "count_gradient_edit", "current", "place", "start", "stop", "validate_world"]
