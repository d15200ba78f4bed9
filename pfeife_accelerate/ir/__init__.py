"""The shared vocabulary: frozen, plain data that every part reads and none owns."""

from pfeife_accelerate.ir.actions import Action, ActionKind, Schedule, ScheduleFamily, ScheduleSpec, parse_family
from pfeife_accelerate.ir.codec import from_json, to_json
from pfeife_accelerate.ir.costs import CostOrigin, CostTable, OpCost, StageCost
from pfeife_accelerate.ir.machine import DeviceSpec, LinkSpec, Machine
from pfeife_accelerate.ir.ops import OpGraph, OpNode
from pfeife_accelerate.ir.plan import Edge, Estimate, PipelinePlan, Slicing, StageSpec
from pfeife_accelerate.ir.tensors import TensorSpec, dtype_bytes
from pfeife_accelerate.ir.timeline import Interval, MemoryCurve, Timeline

__all__ = [
    "Action", "ActionKind", "CostOrigin", "CostTable", "DeviceSpec", "Edge", "Estimate", "Interval", "LinkSpec",
    "Machine", "MemoryCurve", "OpCost", "OpGraph", "OpNode", "PipelinePlan", "Schedule", "ScheduleFamily",
    "ScheduleSpec", "Slicing", "StageCost", "StageSpec", "TensorSpec", "Timeline", "dtype_bytes", "from_json",
    "parse_family", "to_json",
]  # fmt: skip
