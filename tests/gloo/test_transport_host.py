"""Transfers between two or three processes of one host through shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(90)]

ROOT = str(Path(__file__).parents[2])

SETUP = """
import os, time
from datetime import timedelta
import torch, torch.distributed as dist
from pfeife_accelerate.compat import default_store
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.host_links import connect_host
from pfeife_accelerate.runtime.host_transport import HostTransport, RoutedTransport
from pfeife_accelerate.runtime.transport import DistributedTransport
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
cpu = torch.device("cpu")
links = connect_host(default_store(), "test", rank, num_ranks, timedelta(seconds=LIMIT))
transport = HostTransport(rank, num_ranks, links)
def post(like, peer, tag):
    return transport.post_receive(tuple(like.shape), like.dtype, cpu, peer, tag)
"""


def run(script: str, num_processes: int = 2, limit_s: float = 30) -> list[str]:
    setup = SETUP.replace("LIMIT", str(limit_s))
    result = run_ranks(setup + script, num_processes=num_processes, env={"PYTHONPATH": ROOT}, timeout=60)
    return result.check().lines("ok")


def test_every_kind_of_tensor_arrives_by_tag_in_any_order_and_blocks_are_used_again():
    script = """
torch.manual_seed(0)
dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int64,
          torch.complex64, torch.float8_e4m3fn]
tensors = [(torch.randn(3, 4) * 3).to(dtype) for dtype in dtypes]
tensors += [torch.tensor(2.5), torch.empty(0, 3), torch.randn(3, 4).t(), torch.randn(6)[::2],
            torch.randn(2, requires_grad=True), torch.randn(3, dtype=torch.complex64).conj(), torch.randn(100_000),
            torch.randn(300, 500).t(), torch.randn(3_000_000), torch.randn(4097).to(torch.bool)]
for _ in range(3):
    if rank == 0:
        for tag, tensor in reversed(list(enumerate(tensors))):
            sent = tensor.detach().clone()
            transport.send(sent, 1, tag)
            if sent.dtype != torch.float8_e4m3fn:
                sent.zero_()  # the data have been copied
        transport.post_receive((1,), torch.int64, cpu, 1, 99).wait()
    else:
        pending = [post(tensor, 0, tag) for tag, tensor in enumerate(tensors)]
        for tensor, receive in zip(tensors, pending, strict=True):
            copy = receive.wait()
            assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and not copy.requires_grad
            assert torch.equal(copy.reshape(-1).view(torch.uint8),
                               tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)), tensor
        transport.send(torch.tensor([1]), 0, 99)
transport.flush()
if rank == 0:
    arena = links[1]._arena
    assert arena.bytes_in_use == 0 and os.fstat(arena.fd).st_size < 16_000_000, os.fstat(arena.fd).st_size
print("ok", transport.rank, transport.num_ranks, transport.waiting_for, flush=True)
"""
    assert run(script) == ["ok 0 2 None", "ok 1 2 None"]


def test_sends_never_wait_for_the_reader_and_keep_their_order():
    script = """
peer = 1 - rank
start = time.monotonic()
for number in range(5000):  # far more than a socket takes; both ranks send before either reads
    transport.send(torch.full((200 if number % 100 else 20_000,), number), peer, 3)
took = time.monotonic() - start
pending = [post(torch.zeros(200 if n % 100 else 20_000, dtype=torch.int64), peer, 3) for n in range(5000)]
for number in reversed(range(5000)):
    assert int(pending[number].wait()[0]) == number
for link in links.values():
    link.drain()
dist.barrier()
assert took < 10, took
print("ok", rank, flush=True)
"""
    assert run(script) == ["ok 0", "ok 1"]


def test_a_peer_that_dies_is_an_error_at_once_on_both_sides():
    script = """
dist.barrier()
if rank == 0:
    os._exit(0)
start = time.monotonic()
try:
    transport.post_receive((2, 3), torch.bfloat16, cpu, 0, 5).wait()
except PfeifeError as error:
    expected = "PF401 rank 0 of the pipeline went away while waiting for a bfloat16 tensor of shape (2, 3) (tag 5)"
    assert str(error).startswith(expected), error
else:
    raise AssertionError
try:
    transport.send(torch.zeros(2), 0, 1)
    transport.flush()
except PfeifeError as error:
    assert str(error).startswith("PF401 rank 0 of the pipeline went away while waiting for it to receive"), error
else:
    raise AssertionError
assert time.monotonic() - start < 5
print("ok", rank, flush=True)
"""
    assert run(script) == ["ok 1"]


def test_late_peers_wrong_sizes_and_aborts_are_errors():
    script = """
import threading
if rank == 1:
    try:
        transport.post_receive((2,), torch.float32, cpu, 0, 1).wait()
    except PfeifeError as error:
        assert str(error).startswith("PF402 rank 0 of the pipeline was late while waiting for a float32"), error
    else:
        raise AssertionError
    dist.barrier()
    try:
        transport.post_receive((3,), torch.float32, cpu, 0, 2).wait()
    except PfeifeError as error:
        assert str(error).startswith("PF403 rank 0 sent 8 bytes where rank 1 expects a float32 tensor of"), error
    else:
        raise AssertionError
    threading.Timer(0.2, transport.abort, ["enough"]).start()
    assert transport.waiting_for is None
    try:
        transport.post_receive((2,), torch.float32, cpu, 0, 3).wait()
    except PfeifeError as error:
        assert str(error).startswith("PF405 transfers between the ranks were stopped: enough"), error
    else:
        raise AssertionError
    for call in (lambda: transport.send(torch.zeros(1), 0, 0), lambda: post(torch.zeros(1), 0, 0)):
        try:
            call()
        except PfeifeError as error:
            assert error.id == "PF405"
        else:
            raise AssertionError
else:
    dist.barrier()
    transport.send(torch.zeros(2), 1, 2)
dist.barrier()
print("ok", rank, flush=True)
"""
    assert run(script, limit_s=1.5) == ["ok 0", "ok 1"]


def test_ranks_on_other_hosts_are_reached_by_the_process_group():
    script = """
if rank > 0:  # as if rank 0 were on another host
    links.pop(0)
    near = frozenset(links)
    transport = RoutedTransport(HostTransport(rank, 3, links), near, DistributedTransport(dist.group.WORLD, cpu))
else:
    transport = DistributedTransport(dist.group.WORLD, cpu)
assert (transport.rank, transport.num_ranks, transport.waiting_for) == (rank, 3, None)
pending = {peer: transport.post_receive((2,), torch.int64, cpu, peer, 1) for peer in range(3) if peer != rank}
for peer in pending:
    transport.send(torch.tensor([rank, peer]), peer, 1)
assert {peer: receive.wait().tolist() for peer, receive in pending.items()} == {p: [p, rank] for p in pending}
transport.flush()
dist.barrier()
print("ok", rank, flush=True)
"""
    assert run(script, 3) == ["ok 0", "ok 1", "ok 2"]


def test_a_forked_process_does_not_keep_the_connection_open():
    script = """
if rank == 0:
    dist.barrier()
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    os._exit(0)
dist.barrier()
start = time.monotonic()
try:
    transport.post_receive((1,), torch.float32, cpu, 0, 5).wait()
except PfeifeError as error:
    assert error.id == "PF401"
assert time.monotonic() - start < 10
print("ok", rank, flush=True)
"""
    assert run(script) == ["ok 1"]


def test_ranks_that_cannot_reach_one_another_get_no_connection():
    script = """
import pfeife_accelerate.runtime.host_links as module
module._call = lambda address: None  # a sandbox that forbids it
assert connect_host(default_store(), "again", rank, num_ranks, timedelta(seconds=5)) == {}
module._host = lambda: f"host {rank}"
assert connect_host(default_store(), "apart", rank, num_ranks, timedelta(seconds=5)) == {}
dist.barrier()
print("ok", rank, flush=True)
"""
    assert run(script) == ["ok 0", "ok 1"]
