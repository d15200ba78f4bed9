"""Results that every rank of a pipeline gets: the loss after a step, the outputs after an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pfeife_accelerate.capture.deferred import DeferredTensor
from pfeife_accelerate.session.call import Call

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session

_RESULT_TAG = 1 << 27
_INPUT_TAG = _RESULT_TAG + (1 << 21)


def exchange_scalars(session: Session, call: Call, scalars: list[torch.Tensor] | None, verdict: bool) -> bool:
    """The loss rank tells the others the loss and the other one-element values, and its verdict on the schedule."""
    transport = session.transport
    leader = session.conductor.leader
    if session.conductor.leads:
        assert scalars is not None
        # A loss with several elements, differentiated with a gradient given to backward, is not one of the numbers.
        single = [s.detach().reshape(-1)[0] if s.numel() == 1 else torch.tensor(torch.nan) for s in scalars]
        numbers = torch.stack([s.to("cpu", torch.float64) for s in single]).to(session.device)
        count = torch.tensor([len(scalars), verdict], dtype=torch.int64, device=session.device)
        for peer in session.followers():
            transport.send(count, peer, _RESULT_TAG)
            transport.send(numbers, peer, _RESULT_TAG + 1)
    else:
        count = transport.post_receive((2,), torch.int64, session.device, leader, _RESULT_TAG).wait()
        number = int(count[0])
        numbers = transport.post_receive((number,), torch.float64, session.device, leader, _RESULT_TAG + 1).wait()
    call.scalars = numbers.tolist()
    transport.flush()
    return bool(count[1])


def share_input_gradients(session: Session, call: Call) -> None:
    """Sum the gradients of the call's arguments over the ranks whose stages read them.

    The loss rank gets all sums; the others get those of arguments that modules outside the pipeline have made.
    """
    plan = call.resolver.plan
    assert plan is not None
    transport, rank, leader = session.transport, session.mesh.rank, session.conductor.leader
    for link in call.links:
        own, link.leaf.grad = link.leaf.grad, None
        gradient = torch.zeros_like(link.leaf) if own is None else own
        tag = _INPUT_TAG + link.index
        readers = {plan.stage_ranks[stage] for stage in call.staged.stages_that_read(link.index)} - {leader}
        if rank in readers:
            transport.send(gradient, leader, tag)
        shape = tuple(gradient.shape)
        if rank == leader:
            for reader in sorted(readers):
                gradient = gradient + transport.post_receive(shape, gradient.dtype, gradient.device, reader, tag).wait()
        if not isinstance(link.source, DeferredTensor):
            if rank == leader:
                for peer in session.followers():
                    transport.send(gradient, peer, tag)
            else:
                gradient = transport.post_receive(shape, gradient.dtype, gradient.device, leader, tag).wait()
        call.input_gradients[link.index] = gradient
    transport.flush()


def share_values(session: Session, call: Call, names: tuple[str, ...]) -> None:
    """After an evaluation every rank gets every result."""
    plan = call.resolver.plan
    assert plan is not None
    transport, mesh = session.transport, session.mesh
    pending = {}
    for i, name in enumerate(names):
        owner = plan.stage_ranks[call.staged.producer_of[name]]
        if owner == mesh.rank:
            for peer in range(mesh.pipeline_size):
                if peer != mesh.rank:
                    transport.send(call.values[name], peer, _RESULT_TAG + 2 + i)
        else:
            info = call.info(name)
            pending[name] = transport.post_receive(info.shape, info.dtype, session.device, owner, _RESULT_TAG + 2 + i)
    call.values.update({name: receive.wait() for name, receive in pending.items()})
    transport.flush()
