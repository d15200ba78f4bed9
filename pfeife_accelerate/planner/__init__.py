"""From costs to a plan: where to cut, in which order to run, what it should take."""

from pfeife_accelerate.planner.bound import BoundKind, LowerBound, lower_bound
from pfeife_accelerate.planner.options import SearchOptions
from pfeife_accelerate.planner.pipeline_plan import pipeline_plan
from pfeife_accelerate.planner.planned import Planned, RunnerUp
from pfeife_accelerate.planner.problem import Problem
from pfeife_accelerate.planner.search import make_plan
from pfeife_accelerate.planner.simulate import MessageBytes, simulate
from pfeife_accelerate.planner.split_points import cuts_at

__all__ = [
    "BoundKind", "LowerBound", "MessageBytes", "Planned", "Problem", "RunnerUp", "SearchOptions", "cuts_at",
    "lower_bound", "make_plan", "pipeline_plan", "simulate",
]  # fmt: skip
