"""Sharded data parallelism (ZeRO 2 and 3) by arithmetic: the time of a step, and the memory of a device.

Models: all devices compute their share of the batch at once; gradients are reduced and scattered while the backward
runs, parameters gathered while forward and backward run (stage 3) or after the optimizer's step, in the open (stage 2);
a ring over the links of the host; DeepSpeed's buckets. Ignores: what gathering a tensor costs the host, stragglers, and
how little a device with hardly any memory left computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pfeife_accelerate.ir import CostGraph, LinkSpec

__all__ = ["Sharded", "sharded"]

#: Elements of DeepSpeed's buckets by default.
_BUCKET: Final = 500_000_000
#: Buckets' worth of memory that overlapping takes (Transformers' documentation of DeepSpeed: 4.5 times each of both).
_BUCKETS: Final = {2: 2 * 4.5, 3: 4.5}
#: Elements of parameters that stage 3 keeps gathered at most, by default.
_LIVE: Final = 1_000_000_000
#: Bytes an element that the optimizer keeps beside the parameter: Adam's two, and a copy in full precision of 16 bits.
_OPTIMIZER: Final = {2: 12, 4: 8}


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """One step, and what a device holds at its peak."""

    compute_s: float
    optimizer_s: float
    waiting_s: float  #: for what is gathered and scattered in the open
    state_bytes: float  #: parameters, gradients, optimizer
    buffer_bytes: float
    activation_bytes: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.optimizer_s + self.waiting_s

    @property
    def peak_bytes(self) -> float:
        """All of it."""
        return self.state_bytes + self.buffer_bytes + self.activation_bytes


def sharded(graph: CostGraph, link: LinkSpec, *, stage: int, num_devices: int, element_bytes: int) -> Sharded:
    """ZeRO of this stage; `graph` has the costs of a device's share of the batch."""
    uses = {use.owner: use for node in graph.nodes for use in node.params if use.state_bytes > use.num_bytes}
    param_bytes = sum(use.num_bytes for use in uses.values())
    elements = param_bytes / element_bytes
    forward_s = sum(node.forward_s for node in graph.nodes)
    backward_s = graph.work_s - forward_s
    part = 1 / num_devices
    once_s = _collective_s(param_bytes, link, num_devices)
    if stage == 2:
        last_s = _collective_s(min(_BUCKET * element_bytes, param_bytes), link, num_devices)
        waiting_s = max(once_s - backward_s, last_s) + once_s
        kept = 1 + part + _OPTIMIZER[element_bytes] / element_bytes * part
    else:
        waiting_s = max(once_s - forward_s, 0.0) + max(2 * once_s - backward_s, 0.0)
        kept = (2 + _OPTIMIZER[element_bytes] / element_bytes) * part
    live = min(_LIVE, elements) if stage == 3 else 0
    return Sharded(
        compute_s=graph.work_s,
        optimizer_s=sum(use.optimizer_s for use in uses.values()) * part,
        waiting_s=waiting_s,
        state_bytes=kept * param_bytes,
        buffer_bytes=(_BUCKETS[stage] * _BUCKET + live) * element_bytes,
        activation_bytes=sum(node.saved_bytes for node in graph.nodes)
        + max(node.workspace_bytes for node in graph.nodes),
    )


def _collective_s(num_bytes: float, link: LinkSpec, num_devices: int) -> float:
    """A ring's all-gather or reduce-scatter: all parts but one's own pass by."""
    others = num_devices - 1
    return others * link.transfer_s(int(num_bytes / num_devices))
