"""What slicings make of a graph: the costs of stages and of what they send, for many slicings at once.

Models: sums by prefix; tensors sent directly from producer to each rank that reads them, once; parameters and optimizer
steps once a rank; a stage that recomputes keeps its inputs alone and runs its forward again in the backward, all of
which is in the first half where there are two.
Ignores: order and overlap.

Legend: arrays have a row for each stage, message or rank, and a column for each slicing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pfeife_accelerate.ir import ParamUse
from pfeife_accelerate.planner.problem import Floats, Ints, Problem
from pfeife_accelerate.schedule.messages import Message, Messages

__all__ = ["Slices"]

_MOST_CELLS = 20_000_000


class Slices:
    """Some slicings of one problem with one placement: `cuts` has a row for each slicing.

    `nearest_only` leaves out what passes over a stage: for a first look, where slicings have little else in common.
    """

    def __init__(
        self,
        problem: Problem,
        cuts: Ints,
        stage_ranks: Sequence[int],
        recompute: Sequence[int] = (),
        *,
        nearest_only: bool = False,
    ) -> None:
        self.nearest_only = nearest_only
        self.problem = problem
        self.cuts = cuts
        self.stage_ranks = np.asarray(stage_ranks, dtype=np.int64)
        self.recompute = np.isin(np.arange(len(self.stage_ranks)), np.asarray(recompute, dtype=np.int64))
        number = len(cuts)
        ends = np.full((number, 1), len(problem.graph.nodes))
        bounds = np.concatenate((np.zeros((number, 1), dtype=np.int64), cuts, ends), axis=1).T
        self.first, self.last = bounds[:-1], bounds[1:]

    def __len__(self) -> int:
        """How many slicings."""
        return len(self.cuts)

    def _sum(self, prefix: Floats) -> Floats:
        return prefix[self.last] - prefix[self.first]

    # -- time --------------------------------------------------------------------------------------------------------

    @cached_property
    def forward_s(self) -> Floats:
        """Seconds of each stage's forward, without the host's."""
        return self._sum(self.problem.forward_s)

    @cached_property
    def backward_s(self) -> tuple[Floats, ...]:
        """Seconds of each stage's backward, whole or in its two halves, without the host's."""
        halves = self._sum(self.problem.backward_input_s), self._sum(self.problem.backward_weight_s)
        repeats = self.recompute[:, None]
        again = self.forward_s * repeats
        if not self.problem.is_split:
            return (halves[0] + halves[1] + again,)
        # What the first half computed again is not kept for the second, which may come much later: it has all the work.
        return halves[0] + again + halves[1] * repeats, halves[1] * ~repeats

    @cached_property
    def backward_weight_s(self) -> Floats:
        """The part of each stage's backward for the gradients of parameters."""
        return self._sum(self.problem.backward_weight_s)

    @cached_property
    def durations(self) -> Floats:
        """Rows for `messages`: forwards, backwards (halves apart), messages, their ways back.

        What devices copy for a message is part of the stages at its ends; a gradient's, of its first reader.
        """
        devices = [self.problem.machine.device_of(int(rank)) for rank in self.stage_ranks]
        host_s = np.asarray([device.action_s for device in devices])[:, None]
        ahead = np.asarray([device.runs_ahead for device in devices])[:, None]
        rows = [np.where(ahead, np.maximum(part, host_s), part + host_s) for part in (self.forward_s, *self.backward_s)]
        (latency, rate, copied), (there, back) = self._links(self.messages), self.message_bytes
        # A message of no bytes still takes its latency, one that a slicing does not have takes nothing.
        there_s, back_s = self._traffic[3] * (latency + there / rate), (back > 0) * (latency + back / rate)
        if copied.any():
            routes = np.asarray([message.route for message in self.messages])
            for stages in routes.T:
                np.add.at(rows[0], stages, copied / 2 * there_s)
                np.add.at(rows[1], stages, copied / 2 * back_s)
        return np.concatenate((*rows, (1 - copied) * there_s, (1 - copied) * back_s))

    def durations_for(self, messages: Messages) -> Floats:
        """`durations` for other messages: those that no slicing has take nothing, what only we have is left out."""
        if messages == self.messages:
            return self.durations
        own, others = len(self.messages), len(messages)
        jobs = len(self.durations) - 2 * own
        place = {message.route: index for index, message in enumerate(messages)}
        found = [place.get(message.route, -1) for message in self.messages]
        rows = np.asarray(found, dtype=np.int64)
        known = np.flatnonzero(rows >= 0)
        table = np.zeros((jobs + 2 * others, len(self)))
        table[:jobs] = self.durations[:jobs]
        table[jobs + rows[known]] = self.durations[jobs + known]
        table[jobs + others + rows[known]] = self.durations[jobs + own + known]
        return table

    def holds(self, messages: Messages, conditions: Sequence[tuple[int, int, bool]]) -> Floats | None:
        """Which conditions of an event graph with these messages hold for each slicing; None where all do."""
        if len(self) == 1 and messages == self.messages:
            return None
        own = {message.route: index for index, message in enumerate(self.messages)}
        is_sent = np.zeros((2, len(messages), len(self)), dtype=np.bool_)
        for index, message in enumerate(messages):
            row = own.get(message.route)
            if row is not None:
                is_sent[0, index], is_sent[1, index] = self._traffic[3][row], self._traffic[2][row] > 0
        stages = len(self.stage_ranks)
        column, value, producer, reader = self._crossings
        keys = (column * len(self.problem.graph.values) + value) * self.problem.num_ranks + self.stage_ranks[reader]
        first = _first_of_each(keys, int(keys.max(initial=0)) + 1)[1]
        reads = np.zeros((stages, stages, stages, len(self)), dtype=np.bool_)
        reads[producer, reader[first], reader, column] = True
        table = np.ones((len(conditions) + 1, len(self)))
        for number, (index, consumer, is_gradient) in enumerate(conditions, start=1):
            row = is_sent[int(is_gradient), index]
            table[number] = row if consumer < 0 else row & reads[(*messages[index].route, consumer)]
        return table

    # -- messages ----------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> Messages:
        """All messages that any of the slicings has, those within a rank too; what a slicing lacks takes no time."""
        return self._traffic[0]

    @property
    def message_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of each message, and of its gradient."""
        return self._traffic[1], self._traffic[2]

    @cached_property
    def _traffic(self) -> tuple[Messages, Floats, Floats, Floats]:
        column, value, producer, reader = self._crossings
        if self.nearest_only:
            near = reader == producer + 1
            column, value, producer, reader = column[near], value[near], producer[near], reader[near]
        num_ranks, num_slicings, num_stages = self.problem.num_ranks, len(self), len(self.stage_ranks)
        rank = self.stage_ranks[reader]
        # A tensor goes once to each rank that reads it, whichever of its stages do.
        crossing = np.flatnonzero(np.bincount(value))  # few of all values cross a cut
        number = np.zeros(len(self.problem.graph.values) + 1, dtype=np.int64)
        number[crossing] = np.arange(len(crossing))
        keys = (column * len(crossing) + number[value]) * num_ranks + rank
        once, first = _first_of_each(keys, num_slicings * len(crossing) * num_ranks)
        # It is in the message for the first of these stages, so that none waits for what only later ones read.
        key = producer * num_stages + reader[first]
        # Those of one stage come in the order in which it makes the first value of each, in any of the slicings.
        made = np.full(num_stages**2, len(number), dtype=np.int64)
        np.minimum.at(made, key[once], value[once])
        pairs = np.flatnonzero(made < len(number))
        pairs = pairs[np.lexsort((made[pairs], pairs // num_stages))]
        index = np.zeros(num_stages**2, dtype=np.int64)
        index[pairs] = np.arange(len(pairs))
        route = index[key]
        forward, gradient = self.problem.value_bytes
        cell = route[once] * num_slicings + column[once]
        shape = (len(pairs), num_slicings)

        def total(sizes: Floats | None) -> Floats:
            weights = None if sizes is None else sizes[value[once]]
            return np.bincount(cell, weights, minlength=shape[0] * shape[1]).reshape(shape)

        there, back = total(forward), total(gradient)
        consumers: list[list[int]] = [[] for _ in pairs]
        for side in np.flatnonzero(np.bincount(route * num_stages + reader)).tolist():
            consumers[side // num_stages].append(side % num_stages)
        found = tuple(
            Message(
                producer_stage=pair // num_stages,
                consumer_rank=int(self.stage_ranks[pair % num_stages]),
                consumer_stages=tuple(stages),
                has_grad=grad,
            )
            for pair, stages, grad in zip(pairs.tolist(), consumers, back.any(axis=1).tolist(), strict=True)
        )
        return found, there, back, total(None) > 0

    def _links(self, messages: Messages) -> tuple[Floats, Floats, Floats]:
        """Latency, bytes per second and 1 where devices copy, for each message; within a rank, nothing is copied."""
        ends = [(int(self.stage_ranks[message.producer_stage]), message.consumer_rank) for message in messages]
        links = [self.problem.machine.link_of(*pair) for pair in ends]
        table = [
            (link.latency_s, link.bytes_per_s, float(link.is_copied and source != target))
            for link, (source, target) in zip(links, ends, strict=True)
        ]
        latency, rate, copied = np.asarray(table, dtype=np.float64).reshape(-1, 3).T[:, :, None]
        return latency, rate, copied

    @cached_property
    def _crossings(self) -> tuple[Ints, Ints, Ints, Ints]:
        """(slicing, value, its stage, a stage that reads it) of every read that crosses a cut."""
        value, producer, reader = self.problem.reads
        # Small numbers: these arrays are large.
        starts = np.zeros((len(self), len(self.problem.block_starts) + 1), dtype=np.int16)
        np.put_along_axis(starts, np.searchsorted(self.problem.block_starts, self.cuts) + 1, 1, axis=1)
        stage = np.cumsum(starts, axis=1, dtype=np.int16)
        made, read = stage[:, producer], stage[:, reader]
        column, which = np.nonzero(made != read)
        return column, value[which], made[column, which].astype(np.int64), read[column, which].astype(np.int64)

    # -- memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def input_bytes(self) -> Floats:
        """Bytes that each stage reads from others."""
        column, value, _, reader = self._crossings
        num_values, num_stages = len(self.problem.graph.values), len(self.stage_ranks)
        keys = (column * num_values + value) * num_stages + reader
        once, _ = _first_of_each(keys, len(self) * num_values * num_stages)
        cell = reader[once] * len(self) + column[once]
        sizes = self.problem.value_bytes[0][value[once]]
        shape = (len(self.stage_ranks), len(self))
        return np.bincount(cell, sizes, minlength=shape[0] * shape[1]).reshape(shape)

    @cached_property
    def saved_bytes(self) -> Floats:
        """What each stage keeps from forward to backward."""
        saved = self._sum(self.problem.saved_bytes)
        return np.where(self.recompute[:, None], self.input_bytes, saved) if self.recompute.any() else saved

    @cached_property
    def forward_peak_bytes(self) -> Floats:
        """The most that each stage's forward holds, what it keeps included."""
        peak = self.problem.peak_bytes(self.first, self.last)
        if not self.recompute.any():
            return peak
        again = self.problem.workspace_bytes(self.first, self.last) + self.input_bytes
        return np.where(self.recompute[:, None], again, peak)

    @cached_property
    def backward_workspace_bytes(self) -> Floats:
        """What each stage's backward holds beyond what its forward kept."""
        workspace = self.problem.peak_bytes(self.first, self.last) - self._sum(self.problem.saved_bytes)
        again = self._sum(self.problem.saved_bytes) * self.recompute[:, None]
        return workspace + again

    @cached_property
    def buffer_bytes(self) -> Floats:
        """Of each rank: one message under way on each of its links, in each direction, the largest there is.

        None where a plan may use all of the memory: then somebody has said what there is for the rest.
        """
        if self.problem.options.memory_fraction >= 1:
            return np.zeros((self.problem.num_ranks, len(self)))
        sizes, gradients = self.message_bytes
        largest: dict[tuple[int, int], Floats] = {}
        for message, there, back in zip(self.messages, sizes, gradients, strict=True):
            source, target = int(self.stage_ranks[message.producer_stage]), message.consumer_rank
            if source != target:
                for link, size in (((source, target), there), ((target, source), back)):
                    largest[link] = np.maximum(largest[link], size) if link in largest else size
        total = np.zeros((self.problem.num_ranks, len(self)))
        for (source, target), size in largest.items():
            total[source] += size
            total[target] += size
        return total

    @cached_property
    def rank_work_s(self) -> Floats:
        """Seconds that each rank computes for one micro-batch."""
        total = np.zeros((self.problem.num_ranks, len(self)))
        np.add.at(total, self.stage_ranks, self.forward_s + sum(self.backward_s))
        return total

    @cached_property
    def _tied(self) -> list[tuple[ParamUse, Ints]]:
        """Parameters with several readers, and the stage of each reader in each slicing."""
        return [
            (use, np.stack([(self.first <= reader).sum(axis=0) - 1 for reader in readers]))
            for use, readers in self.problem.tied
        ]

    @cached_property
    def stage_param_bytes(self) -> Floats:
        """Parameters that each stage reads."""
        total = self._sum(self.problem.param_bytes)
        for use, stages in self._tied:
            for stage in range(len(total)):
                total[stage] += (stages == stage).any(axis=0) * use.num_bytes
        return total

    def _per_rank(self, prefix: Floats, field: str) -> Floats:
        total = np.zeros((self.problem.num_ranks, len(self)))
        np.add.at(total, self.stage_ranks, self._sum(prefix))
        for use, stages in self._tied:
            ranks = self.stage_ranks[stages]
            for rank in range(self.problem.num_ranks):
                total[rank] += (ranks == rank).any(axis=0) * getattr(use, field)
        return total

    @cached_property
    def state_bytes(self) -> Floats:
        """Parameters, gradients and optimizer state of each rank."""
        return self._per_rank(self.problem.state_bytes, "state_bytes")

    @cached_property
    def param_bytes(self) -> Floats:
        """Parameters of each rank."""
        return self._per_rank(self.problem.param_bytes, "num_bytes")

    @cached_property
    def optimizer_s(self) -> Floats:
        """Seconds of each rank's optimizer step."""
        return self._per_rank(self.problem.optimizer_s, "optimizer_s")


def _first_of_each(keys: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """The position of the first entry of each different key, in the keys' order; and for each entry that of its key."""
    if num_keys > _MOST_CELLS:
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        return first, first[which]
    where = np.full(num_keys, -1, dtype=np.int32)  # without sorting: this is where the search spends its time
    where[keys[::-1]] = np.arange(len(keys), dtype=np.int32)[::-1]
    return where[where >= 0].astype(np.int64), where[keys].astype(np.int64)
