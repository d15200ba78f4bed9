"""What a plan is wanted for, as arrays: prefix sums over the operations, so that any stage's cost is a difference.

Models: forward, input-gradient and weight-gradient seconds; bytes kept and temporary bytes; parameters with their
state, a tied one counted once a rank; tensors with their readers. Ignores: where cuts are and who runs what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pfeife_accelerate.ir import CostGraph, Machine, ParamUse
from pfeife_accelerate.planner.options import SearchOptions

__all__ = ["Floats", "Ints", "Problem"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

#: Positions that the search looks at; of more, only the cheapest to cut in each stretch of the graph stay.
MAX_POSITIONS = 640
_ALL_POSITIONS = 64  # a graph of so few operations is looked at whole


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A cost graph on some ranks. Arrays with one entry more than there are operations are prefix sums."""

    graph: CostGraph
    machine: Machine
    num_ranks: int
    num_microbatches: int
    options: SearchOptions
    num_beyond: int = 0
    """Micro-batches of the steady state that are left out: each is taken to last as long as the busiest rank works."""

    @property
    def is_split(self) -> bool:
        """Whether the backward is planned in halves, input gradient and weight gradient."""
        family = self.options.family
        return self.options.backward == "split" or (family is not None and family.splits_backward)

    def limit_bytes(self, rank: int) -> int:
        """The memory that a plan may use on a rank."""
        return int(self.machine.device_of(rank).memory_bytes * self.options.memory_fraction)

    @cached_property
    def limits(self) -> Floats:
        """`limit_bytes` of every rank."""
        return np.asarray([self.limit_bytes(rank) for rank in range(self.num_ranks)], dtype=np.float64)

    # -- operations --------------------------------------------------------------------------------------------------

    @cached_property
    def forward_s(self) -> Floats:
        """Prefix sums of forward seconds."""
        return _prefix([node.forward_s for node in self.graph.nodes])

    @cached_property
    def backward_input_s(self) -> Floats:
        """Prefix sums of the seconds for gradients of values."""
        return _prefix([node.backward_input_s for node in self.graph.nodes])

    @cached_property
    def backward_weight_s(self) -> Floats:
        """Prefix sums of the seconds for gradients of parameters."""
        return _prefix([node.backward_weight_s for node in self.graph.nodes])

    @cached_property
    def work_s(self) -> Floats:
        """Prefix sums of forward and backward seconds."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    @cached_property
    def saved_bytes(self) -> Floats:
        """Prefix sums of the bytes kept from forward to backward."""
        return _prefix([node.saved_bytes for node in self.graph.nodes])

    @cached_property
    def _peaks(self) -> list[Floats]:
        """Sparse table: row k holds, for each operation, the highest memory in the 2**k operations from there."""
        return _sparse_table(self.saved_bytes[1:] + self._workspaces)

    @cached_property
    def _workspaces(self) -> Floats:
        return np.asarray([node.workspace_bytes for node in self.graph.nodes], dtype=np.float64)

    @cached_property
    def _largest_workspaces(self) -> list[Floats]:
        return _sparse_table(self._workspaces)

    def peak_bytes(self, first: Ints, last: Ints) -> Floats:
        """The most that operations [first, last) hold while they run, kept bytes included; arrays of any one shape."""
        return _highest(self._peaks, first, last) - self.saved_bytes[first]

    def workspace_bytes(self, first: Ints, last: Ints) -> Floats:
        """The most that operations [first, last) hold while they run where none of them keeps anything."""
        return _highest(self._largest_workspaces, first, last)

    # -- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def uses(self) -> tuple[tuple[int, ParamUse], ...]:
        """Every use of a parameter, with the operation that makes it."""
        return tuple((index, use) for index, node in enumerate(self.graph.nodes) for use in node.params)

    @cached_property
    def tied(self) -> tuple[tuple[ParamUse, tuple[int, ...]], ...]:
        """Parameters that several operations read, with those operations."""
        readers: dict[int, list[int]] = {}
        first: dict[int, ParamUse] = {}
        for index, use in self.uses:
            readers.setdefault(use.owner, []).append(index)
            first.setdefault(use.owner, use)
        return tuple((first[owner], tuple(found)) for owner, found in readers.items() if len(found) > 1)

    def _untied(self, field: str) -> Floats:
        shared = {use.owner for use, _ in self.tied}
        sizes = np.zeros(len(self.graph.nodes))
        for index, use in self.uses:
            if use.owner not in shared:
                sizes[index] += getattr(use, field)
        return _prefix(sizes)

    @cached_property
    def state_bytes(self) -> Floats:
        """Prefix sums of parameter, gradient and optimizer state bytes; without tied parameters."""
        return self._untied("state_bytes")

    @cached_property
    def param_bytes(self) -> Floats:
        """Prefix sums of parameter bytes; without tied parameters."""
        return self._untied("num_bytes")

    @cached_property
    def optimizer_s(self) -> Floats:
        """Prefix sums of the optimizer step's seconds; without tied parameters."""
        return self._untied("optimizer_s")

    # -- tensors -----------------------------------------------------------------------------------------------------

    @cached_property
    def crossing_bytes(self) -> Floats:
        """Bytes, there and back, of the tensors that cross each position."""
        change = np.zeros(len(self.graph.nodes) + 2)
        for value in self.graph.values:
            if value.readers:
                change[value.producer + 1] += value.num_bytes + value.gradient_bytes
                change[value.readers[-1] + 1] -= value.num_bytes + value.gradient_bytes
        return np.cumsum(change[:-1])

    @cached_property
    def reads(self) -> tuple[Ints, Ints, Ints]:
        """(value, producing block, reading block) of every read from another block, as three arrays.

        A block is what lies between two neighbouring positions: no cut that is looked at divides it.
        """
        pairs = [(i, value.producer, reader) for i, value in enumerate(self.graph.values) for reader in value.readers]
        table = np.asarray(pairs, dtype=np.int64).reshape(-1, 3)
        table[:, 1:] = np.searchsorted(self.block_starts, table[:, 1:], side="right")
        table = np.unique(table[table[:, 1] != table[:, 2]], axis=0)
        return table[:, 0], table[:, 1], table[:, 2]

    @cached_property
    def block_starts(self) -> Ints:
        """The first operation of every block but the first: all positions, and the cuts that the user gives."""
        given = self.options.cuts or ()
        return np.union1d(self.positions, np.asarray(given, dtype=np.int64))

    @cached_property
    def value_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of every tensor, and of its gradient."""
        values = self.graph.values
        forward = np.asarray([value.num_bytes for value in values], dtype=np.float64)
        return forward, np.asarray([value.gradient_bytes for value in values], dtype=np.float64)

    # -- positions ---------------------------------------------------------------------------------------------------

    @cached_property
    def positions(self) -> Ints:
        """Legal cuts worth a look, increasing.

        Between two of the same prefix sums, of time and of memory, only the one with the least crossing bytes differs;
        where there are too many, one of each stretch of the graph stays.
        """
        legal = np.asarray(self.graph.legal_cuts, dtype=np.int64)
        if len(legal) <= _ALL_POSITIONS:
            return legal
        sums = np.stack([self.work_s[legal], self.saved_bytes[legal], self.state_bytes[legal]])
        apart = self._cheapest(legal, np.cumsum(np.concatenate(([0], np.diff(sums).any(axis=0)))))
        if len(apart) >= max(_ALL_POSITIONS, self.num_ranks * (self.options.num_loops or 1)):
            legal = apart
        if len(legal) > MAX_POSITIONS:
            # Half of the stretches are equal in time, half in number: a few long operations starve nobody.
            half = MAX_POSITIONS // 2
            by_time = np.floor(self.work_s[legal] / max(self.work_s[-1], 1e-30) * half).clip(max=half - 1)
            by_count = np.arange(len(legal)) * half // len(legal)
            legal = np.union1d(self._cheapest(legal, by_time), self._cheapest(legal, by_count))
        return legal

    def _cheapest(self, positions: Ints, group: npt.NDArray[np.generic]) -> Ints:
        order = np.lexsort((positions, self.crossing_bytes[positions], group))
        first = np.concatenate(([True], np.diff(group[order].astype(np.int64)) > 0))
        return np.sort(positions[order][first])


def _sparse_table(values: Floats) -> list[Floats]:
    rows = [values]
    while 2 ** len(rows) <= len(values):
        half = 2 ** (len(rows) - 1)
        rows.append(np.maximum(rows[-1][:-half], rows[-1][half:]))
    return rows


def _highest(table: list[Floats], first: Ints, last: Ints) -> Floats:
    """The highest value from `first` to before `last`, by two rows that overlap."""
    level = np.floor(np.log2(np.maximum(last - first, 1))).astype(np.int64)
    highest = np.empty(first.shape)
    for k in np.unique(level):
        here = level == k
        row = table[int(k)]
        highest[here] = np.maximum(row[first[here]], row[last[here] - 2 ** int(k)])
    return highest


def _prefix(values: Sequence[float] | Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
