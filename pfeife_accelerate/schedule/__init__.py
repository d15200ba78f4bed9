"""Orders of work: generated from a spec, lowered to executable lists, proved to run, drawn."""

from pfeife_accelerate.schedule.derive import for_microbatches, in_sequence
from pfeife_accelerate.schedule.families import (
    backward_only,
    build,
    build_for,
    forward_only,
    gpipe,
    looped,
    one_f_one_b,
)
from pfeife_accelerate.schedule.lowering import DEFAULT_LOOKAHEAD, LOWERING, lower
from pfeife_accelerate.schedule.messages import (
    Message,
    Messages,
    Transfer,
    by_first_reader,
    chain_messages,
    messages_between,
    transfer_of,
)
from pfeife_accelerate.schedule.render import render, render_lowered, to_csv
from pfeife_accelerate.schedule.validate import is_executable, validate

__all__ = [
    "DEFAULT_LOOKAHEAD", "LOWERING", "Message", "Messages", "Transfer", "backward_only", "build", "build_for",
    "by_first_reader", "chain_messages", "for_microbatches", "forward_only", "gpipe", "in_sequence", "is_executable",
    "looped", "lower", "messages_between", "one_f_one_b", "render", "render_lowered", "to_csv", "transfer_of",
    "validate",
]  # fmt: skip
