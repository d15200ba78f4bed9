"""Sums of tied parameters' gradients: when they start, and that all holders have the same ones."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pfeife_accelerate.runtime.local_transport import LocalTransport
from pfeife_accelerate.session.placement import Placement
from pfeife_accelerate.session.tied import TiedSums

pytestmark = pytest.mark.local

GRADIENTS = {0: {"both": 1.0, "outer": 10.0}, 1: {"both": 2.0}, 2: {"outer": None}}
STAGES = {"both": (0, 1), "outer": (0, 2), "own": (1,)}


def sums_of(transport: LocalTransport) -> TiedSums:
    states = {name: nn.Parameter(torch.zeros(3)) for name in STAGES}
    for name, value in GRADIENTS[transport.rank].items():
        states[name].grad = None if value is None else torch.full((3,), value)
    return TiedSums(Placement(STAGES, (0, 1, 2), states, transport.rank), transport)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sender and receiver of each message."""
    notes: list[tuple[int, int]] = []
    send = LocalTransport.send

    def noted(self: LocalTransport, tensor: torch.Tensor, peer: int, tag: int) -> None:
        notes.append((self.rank, peer))
        send(self, tensor, peer, tag)

    monkeypatch.setattr(LocalTransport, "send", noted)
    return notes


def finish(sums: list[TiedSums]) -> list[dict[str, list[float] | None]]:
    found: list[dict[str, list[float] | None]] = [{} for _ in sums]

    def rank(number: int) -> None:
        totals = sums[number].finish()
        found[number] = {name: None if total is None else total.tolist() for name, total in totals.items()}

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(sums))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


SUMS = [{"both": [3.0] * 3, "outer": [10.0] * 3}, {"both": [3.0] * 3}, {"outer": [10.0] * 3}]


def test_a_holder_sends_its_gradient_as_soon_as_no_stage_of_its_own_adds_to_it(sent: list[tuple[int, int]]):
    sums = [sums_of(transport) for transport in LocalTransport.make(3)]
    sums[1].go_on({"both", "own"})
    assert sent == []
    sums[1].go_on({"own"})
    assert set(sent) == {(1, 0)}
    so_far = len(sent)
    sums[1].go_on(())
    sums[0].go_on(())
    assert len(sent) == so_far
    sums[2].go_on(())
    assert set(sent[so_far:]) == {(2, 0)}
    so_far = len(sent)
    assert finish(sums) == SUMS
    assert {sender for sender, _ in sent[so_far:]} == {0}


def test_where_messages_are_matched_by_order_nothing_starts_before_the_end(sent: list[tuple[int, int]]):
    sums = [sums_of(transport) for transport in LocalTransport.make(3, check_pair_order=True)]
    for of_rank in sums:
        of_rank.go_on(())
    assert sent == []
    assert finish(sums) == SUMS


def test_a_gradient_that_nobody_has_is_none():
    sums = [sums_of(transport) for transport in LocalTransport.make(3)]
    sums[0]._placement.shared["outer"].grad = None
    assert [found.get("outer") for found in finish(sums)] == [None] * 3
