"""Transfers between threads of one process."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.local_transport import LocalTransport
from pfeife_accelerate.runtime.transport import AbstractTransport

pytestmark = [pytest.mark.local, pytest.mark.timeout(60)]

CPU = torch.device("cpu")
TENSORS = [
    torch.randn(3, 4),
    torch.randn(2).to(torch.bfloat16),
    torch.tensor([True, False]),
    torch.randn(3, dtype=torch.complex64),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.randn(3, 4).t(),
    torch.randn(2, requires_grad=True),
]


def post(transport: AbstractTransport, like: torch.Tensor, peer: int, tag: int):
    return transport.post_receive(tuple(like.shape), like.dtype, CPU, peer, tag)


def test_every_kind_of_tensor_arrives():
    first, second = LocalTransport.make(2)
    pending = [post(second, tensor, 0, tag) for tag, tensor in enumerate(TENSORS)]
    for tag, tensor in reversed(list(enumerate(TENSORS))):
        first.send(tensor, 1, tag)
    first.flush()
    for tensor, receive in zip(TENSORS, pending, strict=True):
        copy = receive.wait()
        assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype and not copy.requires_grad


def test_the_two_ranks_share_no_memory():
    first, second = LocalTransport.make(2)
    tensor = torch.zeros(3)
    receive = post(second, tensor, 0, 0)
    first.send(tensor, 1, 0)
    tensor += 1
    assert torch.equal(receive.wait(), torch.zeros(3))


def test_messages_with_one_tag_fill_receives_in_the_order_posted():
    first, second = LocalTransport.make(2)
    pending = [post(second, torch.tensor(0), 0, 7) for _ in range(3)]
    for number in range(3):
        first.send(torch.tensor(number), 1, 7)
    assert [int(receive.wait()) for receive in reversed(pending)] == [2, 1, 0]


def test_a_receive_waits_for_its_send_and_knows_for_whom():
    first, second = LocalTransport.make(2)
    receive = post(second, torch.tensor(0), 0, 0)
    result: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: result.append(receive.wait()))
    thread.start()
    time.sleep(0.05)
    assert second.waiting_for == 0 and not result
    first.send(torch.tensor(5), 1, 0)
    thread.join(10)
    assert result == [torch.tensor(5)] and second.waiting_for is None
    assert (second.rank, second.num_ranks) == (1, 2)


def test_waits_end_by_time():
    first, second = LocalTransport.make(2, timeout_s=0.05)
    receive = second.post_receive((2,), torch.float32, CPU, 0, 3)
    with pytest.raises(
        PfeifeError, match=r"PF402 rank 1 waited 0.05 s for rank 0: a float32 tensor of shape \(2,\) \(tag 3\)"
    ):
        receive.wait()
    first.send(torch.zeros(2), 1, 4)
    with pytest.raises(PfeifeError, match=r"PF402 rank 0 waited 0.05 s for rank 1 to receive tag 4"):
        first.flush()


def test_a_tensor_that_was_not_expected_is_refused():
    first, second = LocalTransport.make(2)
    receive = second.post_receive((2,), torch.float32, CPU, 0, 0)
    first.send(torch.zeros(2, 1), 1, 0)
    with pytest.raises(PfeifeError, match=r"PF403 rank 0 sent a float32 tensor of shape \(2, 1\) .* rank 1 expects"):
        receive.wait()


def test_an_order_that_needs_tags_can_be_refused():
    first, second = LocalTransport.make(2, check_pair_order=True)
    first.send(torch.zeros(2), 1, 0)
    post(second, torch.zeros(2), 0, 0)
    post(second, torch.zeros(2), 0, 2)
    with pytest.raises(
        PfeifeError, match=r"PF404 message 2 from rank 0 to rank 1 is sent with tag 1 and received with tag 2"
    ):
        first.send(torch.zeros(2), 1, 1)


def test_abort_wakes_all_who_wait():
    transports = LocalTransport.make(3)
    errors: list[str] = []

    def wait(transport: AbstractTransport) -> None:
        try:
            post(transport, torch.tensor(0), 0, 0).wait()
        except PfeifeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=(transport,)) for transport in transports[1:]]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    transports[0].abort("rank 0 failed")
    for thread in threads:
        thread.join(10)
    assert errors == ["PF405 transfers between the ranks were stopped: rank 0 failed"] * 2
    with pytest.raises(PfeifeError, match="PF405"):
        transports[1].send(torch.tensor(0), 0, 0)
    with pytest.raises(PfeifeError, match="PF405"):
        post(transports[1], torch.tensor(0), 0, 0)
