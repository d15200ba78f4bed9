"""Time each distinct operation once, alone, on the device.

Models: forward; backward with the gradient of parameters added to what is there, as from the second micro-batch on;
storages kept for the backward, each counted once, at the first operation of the graph that keeps it; on CUDA the
temporary memory of an operation, which includes the gradients it makes.
Ignores: cold caches between operations, the sum of gradients where a value has several readers, temporary memory on
CPU, and what lies behind the model's parameters and the call's inputs: both are there anyway and count as kept by none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from pfeife_accelerate.compat import storage_id
from pfeife_accelerate.cost.calibration import calibrated
from pfeife_accelerate.cost.hardware import device_spec
from pfeife_accelerate.cost.roofline import estimate, flops, moved_bytes, saves
from pfeife_accelerate.ir import CostOrigin, DeviceSpec, OpCost
from pfeife_accelerate.ir.costs import MeasurableOp, OperandRole, PreparedOp
from pfeife_accelerate.log import get_logger

__all__ = ["OpProfile", "measure"]

_LOG = get_logger(__name__)
_FREE = OpCost(forward_s=0.0, origin=CostOrigin.MEASURED)
_LEAST_SAMPLE_S = 1e-4  # an operation shorter than this is run several times between two looks at the clock
_MOST_CALLS = 16
_SLOW_S = 0.05  # from here on one run more is enough, and from ten times that the first run is
_LEAST_BACKWARD_S = 5e-7
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
    with _clean_slate(device):
        overhead_s: float | None = None
        for number, op in enumerate(new):
            tell(number, len(new))
            if time.perf_counter() < end_s:
                try:
                    overhead_s = _engine_s(device) if overhead_s is None else overhead_s
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


# ---------------------------------------------------------------------------------------------------------------------
# One operation
# ---------------------------------------------------------------------------------------------------------------------


def _measured(op: MeasurableOp, device: torch.device, repeats: int, overhead_s: float) -> OpProfile:
    prepared = op.prepare()
    with op.context():
        forward_s = _forward_s(op, prepared, device, repeats)
    prepared = op.prepare() if op.is_inplace else prepared
    before = _reset_peak(device)
    packed: list[torch.Tensor] = []
    with op.context(), torch.autograd.graph.saved_tensors_hooks(partial(_pack, packed), _unpack):
        result = prepared.run()
    outputs = list(_tensors(result))
    workspace_bytes = _peak_over(device, before, outputs)
    keeps_read, keeps_written, other_bytes = _kept(prepared, outputs, len(op.writes), packed)
    input_s, weight_s, backward_workspace = _backward_s(op, prepared, outputs, device, repeats, overhead_s)
    return OpProfile(
        forward_s=forward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        keeps_read=keeps_read,
        keeps_written=keeps_written,
        kept_other_bytes=other_bytes,
        workspace_bytes=max(workspace_bytes, backward_workspace),
    )


def _pack(packed: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    packed.append(tensor.detach())
    return tensor


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _kept(
    prepared: PreparedOp, outputs: Sequence[torch.Tensor], num_writes: int, packed: Sequence[torch.Tensor]
) -> tuple[tuple[bool, ...], tuple[bool, ...], int]:
    """Which operands the backward keeps, and the bytes of other storages that it keeps."""
    kept = {storage_id(t): t.untyped_storage().nbytes() for t in packed}
    reads = tuple(storage_id(t) for t in prepared.reads)
    writes = tuple(storage_id(t) for t in outputs)
    other_bytes = sum(size for storage, size in kept.items() if storage not in {*reads, *writes})
    keeps_written = [storage in kept for storage in writes][:num_writes]
    keeps_written += [False] * (num_writes - len(keeps_written))
    return tuple(storage in kept for storage in reads), tuple(keeps_written), other_bytes


def _backward_s(
    op: MeasurableOp,
    prepared: PreparedOp,
    outputs: Sequence[torch.Tensor],
    device: torch.device,
    repeats: int,
    overhead_s: float,
) -> tuple[float, float, int]:
    """Seconds for the gradients of values, further seconds for those of parameters, and temporary bytes."""
    roots = [t for t in outputs if t.requires_grad]
    if not roots:
        return 0.0, 0.0, 0
    leaves = list(zip(op.reads, prepared.reads, strict=True))
    values = [t for o, t in leaves if t.requires_grad and t.is_leaf and o.role is not OperandRole.STATE]
    weights = [t for o, t in leaves if t.requires_grad and t.is_leaf and o.role is OperandRole.STATE]
    gradients = [torch.ones_like(t) for t in roots]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def run(wanted: list[torch.Tensor]) -> Callable[[], None]:
        def backward() -> None:
            for value in values:
                value.grad = None
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=wanted)

        return backward

    before = _reset_peak(device)
    wanted = values + weights
    all_s = _corrected(_timed(run(wanted), device, repeats), overhead_s) if wanted else 0.0
    workspace_bytes = _peak_over(device, before, ())
    if not values or not weights:
        return (all_s, 0.0, workspace_bytes) if values else (0.0, all_s, workspace_bytes)
    input_s = min(_corrected(_timed(run(values), device, repeats), overhead_s), all_s)
    return input_s, all_s - input_s, workspace_bytes


def _corrected(seconds: float, overhead_s: float) -> float:
    """A backward of its own costs more than as one of many: without what an empty one costs."""
    return max(seconds - overhead_s, _LEAST_BACKWARD_S)


def _engine_s(device: torch.device) -> float:
    """Seconds that a backward takes which computes nothing."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    root, gradient = leaf.view(1), torch.ones(1, device=device)
    return _timed(lambda: torch.autograd.grad(root, root, gradient, retain_graph=True), device, 9)


# ---------------------------------------------------------------------------------------------------------------------
# Clock and memory
# ---------------------------------------------------------------------------------------------------------------------


def _forward_s(op: MeasurableOp, prepared: PreparedOp, device: torch.device, repeats: int) -> float:
    """Median seconds of a forward. An operation that changes its input runs once on each preparation."""
    if not op.is_inplace:
        return _timed(prepared.run, device, repeats)
    _sample_s(prepared.run, device, calls=1)
    return median(_sample_s(op.prepare().run, device, calls=1) for _ in range(max(repeats, 1)))


def _timed(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of one run, after one to warm up; fewer and fewer repeats for what takes long."""
    first_s = _sample_s(run, device, calls=1)
    if first_s > 10 * _SLOW_S and device.type != "cuda":  # there the first run may have loaded a library
        return first_s
    again_s = _sample_s(run, device, calls=1)
    if again_s > _SLOW_S:
        return again_s
    calls = min(_MOST_CALLS, max(1, round(_LEAST_SAMPLE_S / max(again_s, 1e-9))))
    return median(_sample_s(run, device, calls) for _ in range(max(repeats, 1)))


def _sample_s(run: Callable[[], Any], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) * 1e-3 / calls
    began_s = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began_s) / calls


def _reset_peak(device: torch.device) -> int:
    """Bytes allocated now, with the peak starting anew from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak_over(device: torch.device, before: int, outputs: Sequence[torch.Tensor]) -> int:
    if device.type != "cuda":
        return 0
    made = {storage_id(t): t.untyped_storage().nbytes() for t in outputs}
    return max(0, int(torch.cuda.max_memory_allocated(device)) - before - sum(made.values()))


@contextmanager
def _clean_slate(device: torch.device) -> Iterator[None]:
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


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
