"""Trainable tensors outside the pipelined model that take part in the loss: a criterion's weights, another output.

The loss is computed on one rank, but every rank's script has these tensors. The loss rank differentiates stand-ins and
sends the gradients to the others, and every rank continues the backward pass from there through its own copy.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pfeife_accelerate.capture.expression import Expression

if TYPE_CHECKING:
    from pfeife_accelerate.session.lifecycle import Session

_TAG = (1 << 27) + (1 << 20)


class OutsideTensors:
    """The trainable constants of one loss expression; the same ones, in the same order, on every rank.

    A model's own parameter may be among them, used by the script's loss: then every rank that holds it keeps the
    gradient, and the others have nothing to continue through.
    """

    def __init__(self, expression: Expression) -> None:
        self._expression = expression
        self._trainable = [c for c in expression.constants if c.requires_grad]

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._trainable

    @cached_property
    def _stand_ins(self) -> dict[int, torch.Tensor]:
        return {id(c): c.detach().requires_grad_() for c in self._trainable}

    @property
    def constants(self) -> list[torch.Tensor]:
        """The expression's constants, to compute the loss from on the rank that does."""
        given = self._expression.constants
        return [c.detach() if c.is_meta and not c.requires_grad else self._stand_ins.get(id(c), c) for c in given]

    def go_back(self, session: Session) -> None:
        """Once the loss rank has differentiated the loss: finish the backward pass through the real tensors."""
        if not self._trainable:
            return
        leader = session.conductor.leader
        gradients = [self._gradient(session, i, leader) for i in range(len(self._trainable))]
        session.transport.flush()
        here = [(t, g) for t, g in zip(self._trainable, gradients, strict=True) if not t.is_meta]
        if here:
            torch.autograd.backward([tensor for tensor, _ in here], [gradient for _, gradient in here])

    def _gradient(self, session: Session, index: int, leader: int) -> torch.Tensor:
        tensor, transport = self._trainable[index], session.transport
        if session.mesh.rank != leader:
            shape = tuple(tensor.shape)
            return transport.post_receive(shape, tensor.dtype, tensor.device, leader, _TAG + index).wait()
        found = self._stand_ins[id(tensor)].grad
        gradient = torch.zeros_like(tensor) if found is None else found
        for peer in session.followers():
            transport.send(gradient, peer, _TAG + index)
        return gradient
