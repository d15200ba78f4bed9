"""Time each distinct operation once, alone, on the device.

Models: the times of its trial; storages kept for the backward, each counted once, at the first operation of the graph
that keeps it; on CUDA the temporary memory of an operation, which includes the gradients it makes.
Ignores: the sum of gradients where a value has several readers, temporary memory on CPU, and what lies behind the
model's parameters and the call's inputs: both are there anyway and count as kept by none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pfeife_accelerate.cost.calibration import calibrated
from pfeife_accelerate.cost.hardware import device_spec
from pfeife_accelerate.cost.op_trial import OpTrial, engine_s
from pfeife_accelerate.cost.roofline import estimate, flops, moved_bytes, saves
from pfeife_accelerate.ir import CostOrigin, DeviceSpec, OpCost
from pfeife_accelerate.ir.costs import MeasurableOp, OperandRole
from pfeife_accelerate.log import get_logger

__all__ = ["OpProfile", "clean_slate", "measure"]

_LOG = get_logger(__name__)
_FREE = OpCost(forward_s=0.0, origin=CostOrigin.MEASURED)
_FLOPS_PER_BYTE = 10.0  # weighs computing against moving when the longest operations are wanted first


@dataclass(frozen=True, kw_only=True)
class OpProfile:
    """What one kind of operation costs; which operands it keeps is aligned with `MeasurableOp.reads` and `writes`."""

    forward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    keeps_read: tuple[bool, ...] = ()
    keeps_written: tuple[bool, ...] = ()
    kept_other_bytes: int = 0  #: kept for the backward, but neither read nor written (masks, statistics, casts)
    workspace_bytes: int = 0
    origin: CostOrigin = CostOrigin.MEASURED


def measure(
    ops: Sequence[MeasurableOp | None],
    device: torch.device,
    *,
    repeats: int = 3,
    budget_s: float = 20.0,
    spec: DeviceSpec | None = None,
    profiles: MutableMapping[str, OpProfile] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[OpCost, ...]:
    """The cost of each operation on `device`, aligned with `ops`; None costs nothing.

    Operations with equal keys are timed once, the longest first. What fails on made-up data, and what is left when
    `budget_s` seconds are used up, is MODELLED by `spec` (by default: this device, calibrated by what was measured).
    `profiles` holds what is known already, by key, and receives what is measured. `progress` is told before each
    operation how many of those that were not known are done, and how many there are, and once in the end. The
    generators of random numbers are left as they were; on CUDA the peak memory statistics start anew.
    """
    known: MutableMapping[str, OpProfile] = {} if profiles is None else profiles
    left: list[MeasurableOp] = []
    end_s = time.perf_counter() + budget_s
    new = [op for op in _longest_first(ops) if op.key not in known]
    tell = progress if progress is not None and new else _tell_nobody
    with clean_slate(device):
        overhead_s: float | None = None
        for number, op in enumerate(new):
            tell(number, len(new))
            if time.perf_counter() < end_s:
                try:
                    overhead_s = engine_s(device) if overhead_s is None else overhead_s
                    known[op.key] = _measured(op, device, repeats, overhead_s)
                    continue
                except Exception as failure:  # made-up data may be refused in any way
                    _LOG.debug("%s cannot be measured: %s", op.key, failure)
            left.append(op)
        tell(len(new), len(new))
        if left and spec is None:
            measured = [(op, known[op.key]) for op in _longest_first(ops) if op.key in known]
            spec = calibrated(device_spec(device), [(op, _cost_alone(profile)) for op, profile in measured])
    modelled = {op.key: _modelled(op, spec) for op in left if spec is not None}
    if modelled:
        _LOG.info("%d kinds of operation modelled, %d measured", len(modelled), len(known))
    return _costs(ops, {**known, **modelled})


def _cost_alone(profile: OpProfile) -> OpCost:
    return OpCost(forward_s=profile.forward_s, origin=profile.origin)


def _tell_nobody(done: int, total: int) -> None:
    pass


def _costs(ops: Sequence[MeasurableOp | None], profiles: MutableMapping[str, OpProfile]) -> tuple[OpCost, ...]:
    """Profiles applied to each operation: what an earlier one keeps already is not kept twice.

    A region that is computed again keeps what it reads, costs its forward once more in the backward pass, and has all
    that is inside it as temporary memory then.
    """
    kept: set[tuple[int | None, int]] = set()  # None: until the operation's own backward
    made_in: dict[int | None, set[int]] = {}
    inside_bytes: Counter[int | None] = Counter()
    for op in ops:
        if op is not None and op.region is not None:
            made_in.setdefault(op.region, set()).update(operand.storage for operand in op.writes)
    found = []
    for op in ops:
        if op is None:
            found.append(_FREE)
            continue
        profile = profiles[op.key]
        again = op.region is not None
        outside_bytes = 0 if again else profile.kept_other_bytes
        inside_bytes[op.region] += profile.kept_other_bytes
        pairs = [*zip(op.reads, profile.keeps_read, strict=True), *zip(op.writes, profile.keeps_written, strict=True)]
        present = {r.storage for r in op.reads if r.role is not OperandRole.ACTIVATION}
        for operand, keeps in pairs:
            is_inside = again and operand.storage in made_in[op.region]
            key = (op.region if is_inside else None, operand.storage)
            if (keeps or (again and not is_inside)) and key not in kept and operand.storage not in present:
                kept.add(key)
                if is_inside:
                    inside_bytes[op.region] += operand.storage_bytes
                else:
                    outside_bytes += operand.storage_bytes
        later_s = profile.backward_weight_s if op.puts_off else 0.0
        at_once_s = profile.backward_input_s + profile.backward_weight_s - later_s
        found.append(
            OpCost(
                forward_s=profile.forward_s,
                backward_input_s=at_once_s + (profile.forward_s if again else 0.0),
                backward_weight_s=later_s,
                saved_bytes=outside_bytes,
                workspace_bytes=profile.workspace_bytes + (inside_bytes[op.region] if again else 0),
                origin=profile.origin,
            )
        )
    return tuple(found)


def _longest_first(ops: Sequence[MeasurableOp | None]) -> list[MeasurableOp]:
    distinct = {op.key: op for op in reversed(ops) if op is not None}
    uses = Counter(op.key for op in ops if op is not None)

    def weight(op: MeasurableOp) -> float:
        return -uses[op.key] * (flops(op) / _FLOPS_PER_BYTE + moved_bytes(op))

    return sorted(distinct.values(), key=weight)


def _modelled(op: MeasurableOp, spec: DeviceSpec) -> OpProfile:
    cost = estimate(op, spec)
    return OpProfile(
        forward_s=cost.forward_s,
        backward_input_s=cost.backward_input_s,
        backward_weight_s=cost.backward_weight_s,
        keeps_read=saves(op),
        keeps_written=(False,) * len(op.writes),
        origin=CostOrigin.MODELLED,
    )


def _measured(op: MeasurableOp, device: torch.device, repeats: int, overhead_s: float) -> OpProfile:
    trial = OpTrial(op, device, repeats=repeats, overhead_s=overhead_s)
    return OpProfile(
        forward_s=trial.forward_s,
        backward_input_s=trial.backward_input_s,
        backward_weight_s=trial.backward_weight_s,
        keeps_read=trial.keeps_read,
        keeps_written=trial.keeps_written,
        kept_other_bytes=trial.kept_other_bytes,
        workspace_bytes=trial.workspace_bytes,
    )


@contextmanager
def clean_slate(device: torch.device) -> Iterator[None]:
    """Gradients on, the random numbers put back in the end; on CUDA the right device, with nothing queued."""
    is_cuda = device.type == "cuda"
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[device] if is_cuda else []):
        if not is_cuda:
            yield
            return
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            yield
            torch.cuda.empty_cache()
