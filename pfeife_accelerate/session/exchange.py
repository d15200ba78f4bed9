"""Results that every rank of a pipeline gets: the loss after a step, the outputs after an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pfeife_accelerate.session.call import Call

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session

_RESULT_TAG = 1 << 27


def exchange_scalars(session: Session, call: Call, scalars: list[torch.Tensor] | None) -> None:
    """The loss rank tells the others the loss and the other one-element values."""
    transport = session.transport
    leader = session.mesh.pipeline_size - 1
    if session.conductor.leads:
        assert scalars is not None
        # A loss with several elements, differentiated with a gradient given to backward, is not one of the numbers.
        single = [s.detach().reshape(-1)[0] if s.numel() == 1 else torch.tensor(torch.nan) for s in scalars]
        numbers = torch.stack([s.to("cpu", torch.float64) for s in single]).to(session.device)
        count = torch.tensor([len(scalars)], dtype=torch.int64, device=session.device)
        for peer in range(leader):
            transport.send(count, peer, _RESULT_TAG)
            transport.send(numbers, peer, _RESULT_TAG + 1)
    else:
        count = transport.post_receive((1,), torch.int64, session.device, leader, _RESULT_TAG).wait()
        numbers = transport.post_receive((int(count),), torch.float64, session.device, leader, _RESULT_TAG + 1).wait()
    call.scalars = numbers.tolist()
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
