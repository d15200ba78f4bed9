"""Ranks start alike: the first rank's generator states for a pipeline, the main process's parameters for all.

Models: what DistributedDataParallel does when it is made. Scripts that set no seed build another model in each process.
Ignores: tensors on the meta device, whose values come later.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pfeife_accelerate import session
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.log import get_logger
from pfeife_accelerate.session.digests import digests

__all__ = ["align_generators", "align_states", "kept_generators"]

_LOGGER = get_logger(__name__)


def align_generators() -> None:
    """Give all ranks of the pipeline the generator states of its first rank: torch, CUDA, numpy and random."""
    running = session.current()
    assert running is not None
    mesh = running.mesh
    words = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        words.append(torch.cuda.get_rng_state())
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    words.append(torch.from_numpy(np.asarray(keys).view(np.uint8).copy()))
    words.append(torch.tensor([position, has_gauss], dtype=torch.int64))
    words.append(torch.tensor([gauss], dtype=torch.float64))
    version, internal, next_gauss = random.getstate()
    words.append(torch.tensor(internal, dtype=torch.int64))
    words.append(torch.tensor([float("nan") if next_gauss is None else next_gauss], dtype=torch.float64))
    for word in words:
        dist.broadcast(word, group=mesh.pipeline_control_group, group_src=0)
    if mesh.rank == 0:
        return
    torch.set_rng_state(words[0])
    if len(words) == 7:
        torch.cuda.set_rng_state(words[1])
    keys_, place, gauss_, internal_, next_ = words[-5:]
    np.random.set_state((kind, keys_.numpy().view(np.uint32), int(place[0]), int(place[1]), float(gauss_)))
    pending = float(next_)
    random.setstate((version, tuple(internal_.tolist()), None if pending != pending else pending))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Afterwards the generators are where they were: of what runs on some ranks of a pipeline and not on others."""
    of_numpy, of_random = np.random.get_state(), random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_random)


def align_states(module: nn.Module) -> None:
    """Give all ranks of the launch the main process's parameters and buffers. Only what differs is sent."""
    running = session.current()
    assert running is not None
    group = running.mesh.world_control_group
    named = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    states = {name: tensor.detach() for name, tensor in named.items() if not tensor.is_meta}
    _refuse_other_model(module, states, group)
    if not states:
        return
    lowest = digests(states.values())
    highest = lowest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    differing = [tensor for tensor, same in zip(states.values(), (lowest == highest).tolist(), strict=True) if not same]
    for tensor in differing:
        value = tensor.to("cpu", copy=True).contiguous()
        dist.broadcast(value, group=group, group_src=0)
        tensor.copy_(value)
    if differing:
        _LOGGER.info("%d tensors of %s were taken from the main process", len(differing), type(module).__name__)


def _refuse_other_model(module: nn.Module, states: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    shapes = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in states.items()])
    mark = torch.tensor([zlib.crc32(shapes.encode())], dtype=torch.int64)
    marks = [torch.zeros_like(mark) for _ in range(dist.get_world_size(group))]
    dist.all_gather(marks, mark, group=group)
    if any(int(other) != int(marks[0]) for other in marks):
        raise PfeifeError(
            id="PF514",
            what=f"the parameters of {type(module).__name__} have other names, shapes or types on other processes",
            where="Accelerator.prepare",
            why="every process builds the whole model, and keeps a part of it",
            hints=("build the model alike on all processes",),
        )
