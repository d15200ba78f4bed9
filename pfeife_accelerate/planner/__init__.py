"""From costs to a plan: where to cut, in which order to run, what it should take."""

from pfeife_accelerate.planner.memory import peak_memory
from pfeife_accelerate.planner.search import SearchOptions, make_plan
from pfeife_accelerate.planner.simulate import simulate
from pfeife_accelerate.planner.slicing import cuts_at, equal_memory, equal_time, legal_cuts
from pfeife_accelerate.planner.stage_costs import (
    MessageBytes,
    edges_of,
    message_bytes_of,
    messages_of,
    stage_costs,
    stage_params,
)

__all__ = [
    "MessageBytes", "SearchOptions", "cuts_at", "edges_of", "equal_memory", "equal_time", "legal_cuts", "make_plan",
    "message_bytes_of", "messages_of", "peak_memory", "simulate", "stage_costs", "stage_params",
]  # fmt: skip
