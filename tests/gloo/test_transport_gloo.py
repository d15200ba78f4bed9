"""Transfers between two or three processes over gloo."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(90)]

SETUP = """
import os, time, weakref
import torch, torch.distributed as dist
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.transport import DistributedTransport
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
cpu = torch.device("cpu")
"""


def run(script: str, num_processes: int = 2) -> list[str]:
    result = run_ranks(SETUP + script, num_processes=num_processes, timeout=60)
    return result.check().lines("ok")


def test_every_kind_of_tensor_arrives_by_tag_in_any_order():
    script = """
transport = DistributedTransport(dist.group.WORLD, cpu)
torch.manual_seed(0)
dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int64,
          torch.complex64, torch.float8_e4m3fn]
tensors = [(torch.randn(3, 4) * 3).to(dtype) for dtype in dtypes]
tensors += [torch.tensor(2.5), torch.empty(0, 3), torch.randn(3, 4).t(), torch.randn(6)[::2],
            torch.randn(2, requires_grad=True), torch.randn(3, dtype=torch.complex64).conj(), torch.randn(100_000)]
if rank == 0:
    for tag, tensor in reversed(list(enumerate(tensors))):
        transport.send(tensor, 1, tag)
else:
    pending = [transport.post_receive(tuple(t.shape), t.dtype, cpu, 0, tag) for tag, t in enumerate(tensors)]
    for tensor, receive in zip(tensors, pending, strict=True):
        copy = receive.wait()
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and not copy.requires_grad
        assert torch.equal(copy.reshape(-1).view(torch.uint8),
                           tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)), tensor
transport.flush()
print("ok", transport.rank, transport.num_ranks, transport.waiting_for, flush=True)
"""
    assert run(script) == ["ok 0 2 None", "ok 1 2 None"]


def test_ranks_are_those_of_the_group_and_one_tag_keeps_its_order():
    # The pipeline is ranks 2 and 1 of three, so that neither number is the global one.
    script = """
group = dist.new_group([1, 2])
if rank > 0:
    transport = DistributedTransport(group, cpu)
    peer = 1 - transport.rank
    pending = [transport.post_receive((), torch.int64, cpu, peer, 3) for _ in range(20)]
    for number in range(20):
        transport.send(torch.tensor(100 * transport.rank + number), peer, 3)
    assert [int(receive.wait()) for receive in pending] == [100 * peer + number for number in range(20)]
    transport.flush()
dist.barrier()
print("ok", rank, flush=True)
"""
    assert run(script, 3) == ["ok 0", "ok 1", "ok 2"]


def test_a_large_tensor_is_freed_once_it_is_sent_before_flush():
    script = """
transport = DistributedTransport(dist.group.WORLD, cpu)
if rank == 0:
    freed = []
    tensor = torch.zeros(1_000_000)
    weakref.finalize(tensor.untyped_storage(), freed.append, True)
    transport.send(tensor, 1, 0)
    del tensor
    assert not freed
    dist.barrier()
    deadline = time.monotonic() + 10
    while not freed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert freed
    transport.flush()
else:
    time.sleep(0.2)
    transport.post_receive((1_000_000,), torch.float32, cpu, 0, 0).wait()
    dist.barrier()
print("ok", rank, flush=True)
"""
    assert run(script) == ["ok 0", "ok 1"]


def test_a_peer_that_dies_is_an_error_at_once_on_both_sides():
    script = """
transport = DistributedTransport(dist.group.WORLD, cpu)
dist.barrier()
if rank == 0:
    os._exit(0)
start = time.monotonic()
try:
    transport.post_receive((2, 3), torch.bfloat16, cpu, 0, 5).wait()
except PfeifeError as error:
    expected = "PF401 rank 0 of the pipeline went away while waiting for a bfloat16 tensor of shape (2, 3) (tag 5)"
    assert str(error).startswith(expected), error
    assert isinstance(error.__cause__, RuntimeError)
for size in (4, 1_000_000):
    try:
        transport.send(torch.zeros(size), 0, 1)
        transport.flush()
    except PfeifeError as error:
        assert str(error).startswith("PF401 rank 0 of the pipeline went away while waiting for it to receive"), error
    else:
        raise AssertionError(size)
assert time.monotonic() - start < 5
transport.abort("rank 0 failed")
for call in (lambda: transport.send(torch.zeros(1), 0, 0),
             lambda: transport.post_receive((1,), torch.float32, cpu, 0, 0)):
    try:
        call()
    except PfeifeError as error:
        assert str(error) == "PF405 transfers between the ranks were stopped: rank 0 failed"
    else:
        raise AssertionError
print("ok", rank, flush=True)
os._exit(0)
"""
    assert run(script) == ["ok 1"]


def test_waiting_too_long_is_said():
    script = """
from datetime import timedelta
group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
transport = DistributedTransport(group, cpu)
if rank == 0:
    try:
        transport.post_receive((2,), torch.float32, cpu, 1, 0).wait()
    except PfeifeError as error:
        assert str(error).startswith("PF402 rank 1 of the pipeline was late while waiting for a float32"), error
        print("ok", rank, flush=True)
dist.barrier()
os._exit(0)
"""
    assert run(script) == ["ok 0"]
