"""Calls of a model check that all ranks of a pipeline were given the same batch.

Every rank cuts its own copy of the batch, so different copies would train on nonsense without any error. Models: a
digest of every tensor argument, compared by the conductor; after the first few calls that is done only where the
generators of random numbers have drifted apart (numbers drawn on the main process alone), which each call tells.
Ignores: batches that differ later for another reason.
"""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

import torch

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime.remote import ControlPlane
from pfeife_accelerate.session.call import Call
from pfeife_accelerate.session.randomness import digest_of_generators

_CHECKED_CALLS = 3
_LATER = (
    "what runs on the main process alone (a validation, saving) must not draw from the common generators: give it a "
    "generator of its own, or run it on all processes",
)


class BatchCheck:
    """Compares batches between the ranks of one pipeline; `leader` is the conductor's rank in the control plane."""

    def __init__(self, control: ControlPlane, leader: int, num_ranks: int) -> None:
        self._control = control
        self.leader = leader
        self._num_ranks = num_ranks
        self._shown: WeakValueDictionary[int, Call] = WeakValueDictionary()
        control.serve("batch", self._give)

    def show(self, call: Call) -> None:
        """Tell the conductor how far this rank's generators are, and for the first calls what it was given."""
        if self._num_ranks == 1:
            return
        call.generators = digest_of_generators()
        self._shown[call.number] = call
        if self._control.rank != self.leader:
            body: dict[str, Any] = {"rank": self._control.rank, "generators": call.generators}
            if call.number <= _CHECKED_CALLS:
                body["digests"] = _digests(call)
            self._control.post([self.leader], f"batch {call.number}", body)

    def verify(self, call: Call) -> None:
        """On the conductor, before the call's first schedule.

        Raises: PfeifeError PF513 if another rank was given something else.
        """
        own: list[str] | None = None
        for _ in range(self._num_ranks - 1):
            body: dict[str, Any] = self._control.receive(f"batch {call.number}")
            rank, digests = int(body["rank"]), body.get("digests")
            if digests is None:
                if body["generators"] == call.generators:
                    continue
                digests = _decoded(self._control.fetch(rank, "batch", str(call.number)))
            own = _digests(call) if own is None else own
            if digests != own:
                raise _different(rank, self._control.rank, call, own, digests)

    def _give(self, number: str) -> torch.Tensor | None:
        call = self._shown.get(int(number))
        return None if call is None else _encoded(_digests(call))


def _encoded(digests: list[str]) -> torch.Tensor:
    return torch.tensor(list(" ".join(digests).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor) -> list[str]:
    return bytes(text.tolist()).decode().split()


def _digests(call: Call) -> list[str]:
    tensors = [value for value in call.arguments if isinstance(value, torch.Tensor)]
    return [_digest(tensor) for tensor in tensors if not _is_state(tensor)]


def _is_state(value: torch.Tensor) -> bool:
    """Whether a graph argument is a parameter or buffer, which captures replace by fakes."""
    return isinstance(value, torch.nn.Parameter) or value.device.type == "meta" or type(value) is not torch.Tensor


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found = hashlib.blake2b(data.numpy().tobytes(), digest_size=8)
    found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    return found.hexdigest()


def _different(rank: int, leader: int, call: Call, own: list[str], other: list[str]) -> PfeifeError:
    differing = sum(a != b for a, b in zip(own, other, strict=False)) + abs(len(own) - len(other))
    return PfeifeError(
        id="PF513",
        what=f"ranks {rank} and {leader} of one pipeline were given different batches "
        f"({differing} of {len(own)} tensors differ)",
        where=f"call number {call.number} of the model",
        why="all ranks of a pipeline run the same script on the same data; here the data or the random numbers differ",
        hints=(_LATER if call.number > _CHECKED_CALLS else ())
        + (
            "prepare the dataloader: accelerator.prepare(dataloader)",
            "call accelerate.utils.set_seed(...) before data is shuffled or noise is drawn",
            "do not seed by process or rank number",
            "do not draw random numbers in a loop over parameters or gradients: a rank has only its own stages'",
        ),
    )
