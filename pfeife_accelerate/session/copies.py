"""Watches that the ranks' copies of a model that is not pipelined stay the same.

Nothing is exchanged in such a training, so different data or random numbers would go unnoticed. Models: digests of the
inputs and of the parameters at the first calls, and of the parameters at every so many later ones; each rank sends its
own to the pipeline's first rank, and nobody waits. Ignores: optimizer state; it follows from the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pfeife_accelerate.compat import pytree
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.log import get_logger, warn_once
from pfeife_accelerate.session.digests import digests

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel

_LOG = get_logger(__name__)
_FIRST_CALLS = 5
_EVERY = 100


class CopyCheck:
    """Compares the copies of one model within a pipeline."""

    def __init__(self, model: PipelinedModel) -> None:
        mesh = model.session.mesh
        self._model = model
        self._control = model.session.control
        self._first_rank = mesh.pipeline_index * mesh.pipeline_size
        self._leads = mesh.rank == 0
        self._num_others = mesh.pipeline_size - 1
        model.session.num_whole_copies += 1  # the same on all ranks
        self._topic = f"whole copy {model.session.num_whole_copies}"
        self._calls = 0
        self._own: dict[int, tuple[list[int], list[int]]] = {}
        self._early: list[dict[str, Any]] = []

    def next_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a training call, before it runs.

        Raises: PfeifeError PF531, on the first rank, if another rank was given other data.
        """
        self._calls += 1
        if self._num_others and (self._calls <= _FIRST_CALLS or self._calls % _EVERY == 0):
            inputs = digests(_tensors(args, kwargs)).tolist()
            parameters = digests(p.data for p in self._model.module.parameters()).tolist()
            if self._leads:
                self._own[self._calls] = (inputs, parameters)
            else:
                body: dict[str, Any] = {"call": self._calls, "inputs": inputs, "parameters": parameters}
                self._control.post([self._first_rank], self._topic, {**body, "rank": self._control.rank})
        if self._leads:
            self._compare()

    def _compare(self) -> None:
        while (body := self._control.poll(self._topic)) is not None:
            self._early.append(body)
        due = [message for message in self._early if message["call"] <= self._calls]
        self._early = [message for message in self._early if message["call"] > self._calls]
        for message in due:
            inputs, parameters = self._own[message["call"]]
            if message["inputs"] != inputs:
                raise _different_data(message, self._control.rank)
            names = [name for name, _ in self._model.module.named_parameters()]
            pairs = zip(names, parameters, message["parameters"], strict=True)
            if differing := [name for name, own, other in pairs if own != other]:
                self._warn(message, differing)

    def _warn(self, message: dict[str, Any], differing: list[str]) -> None:
        warn_once(
            _LOG,
            self._topic,
            f"the copies of {type(self._model.module).__name__} on ranks {message['rank']} and {self._control.rank} "
            f"are no longer the same (first seen at training call {message['call']}, in {len(differing)} parameters: "
            f"{', '.join(differing[:3])}). The main process trains on as one process would, and its copy is what is "
            "saved; but values that are read on different processes differ. Causes: operations that are not "
            "deterministic, or random numbers drawn on some processes only.",
        )


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def _different_data(message: dict[str, Any], rank: int) -> PfeifeError:
    return PfeifeError(
        id="PF531",
        what=f"ranks {message['rank']} and {rank} of one pipeline were given different batches",
        where=f"training call number {message['call']} of a model that is not pipelined",
        why="all ranks of a pipeline run the same script on the same data; here the data or the random numbers differ",
        hints=(
            "prepare the dataloader: accelerator.prepare(dataloader)",
            "call accelerate.utils.set_seed(...) before data is shuffled or noise is drawn",
            "do not seed by process or rank number",
        ),
    )
