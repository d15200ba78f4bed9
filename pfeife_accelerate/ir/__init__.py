"""The shared vocabulary: frozen, plain data that every part reads and none owns."""

from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule, ScheduleFamily, ScheduleSpec, parse_family
from pfeife_accelerate.ir.codec import from_json, to_json
from pfeife_accelerate.ir.cost_file import read_cost_file, write_cost_file
from pfeife_accelerate.ir.cost_graph import CostGraph, CostNode, CostValue, ParamUse
from pfeife_accelerate.ir.costs import CostOrigin, CostTable, OpCost, StageCost
from pfeife_accelerate.ir.from_ops import cost_graph_of
from pfeife_accelerate.ir.machine import DeviceSpec, LinkSpec, Machine
from pfeife_accelerate.ir.ops import OpGraph, OpNode
from pfeife_accelerate.ir.plan import Edge, PipelinePlan, Slicing, StageSpec
from pfeife_accelerate.ir.tensors import TensorSpec, dtype_bytes
from pfeife_accelerate.ir.timeline import Interval, MemoryCurve, Timeline

__all__ = [
    "Action", "ActionKind", "CostGraph", "CostNode", "CostOrigin", "CostTable", "CostValue", "DeviceSpec", "Edge",
    "Interval", "LinkSpec", "Machine", "MemoryCurve", "OpCost", "OpGraph", "OpNode", "ParamUse",
    "PipelinePlan", "Schedule", "ScheduleFamily", "ScheduleSpec", "Slicing", "StageCost", "StageSpec", "TensorSpec",
    "Timeline", "cost_graph_of", "dtype_bytes", "from_json", "parse_family", "read_cost_file", "to_json",
    "write_cost_file",
]  # fmt: skip
