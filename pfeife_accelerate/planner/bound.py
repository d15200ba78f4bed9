"""A time that no plan can beat, whatever its cuts, placement and order.

Proof, for D ranks and M micro-batches of one size, with X the length of the step, f and b the seconds of an operation's
forward and backward, head(i) the longest chain of forwards before operation i, tail(i) the longest chain of input
gradients behind the one of i:
- work: a rank's first job is some F(i), not before head(i); ranks hold different operations, so together they wait
  at least the D smallest heads, and then run M times all work and the optimizer step once: D X >= M sum(f + b) +
  optimizer + D smallest heads. Likewise a rank's last backward B(i) is followed by tail(i) elsewhere: D smallest
  tails in place of the optimizer step.
- node: all micro-batches of an operation run on one rank: X >= head(i) + M (f + b) + max(tail(i), its optimizer step).
- path: one micro-batch passes i forwards and backwards: X >= head(i) + f + b + tail(i).
Transfers and the host's time only add to it, as does recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from pfeife_accelerate.planner.problem import Floats, Problem

__all__ = ["BoundKind", "LowerBound", "lower_bound"]


class BoundKind(str, Enum):
    """Which of the arguments gives the highest bound."""

    WORK = "work"
    NODE = "node"
    PATH = "path"


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """No step is shorter than `seconds`."""

    seconds: float
    kind: BoundKind

    def gap(self, estimate_s: float) -> float:
        """How far an estimate is above it, as a share of it."""
        return estimate_s / self.seconds - 1 if self.seconds > 0 else 0.0


def lower_bound(problem: Problem) -> LowerBound:
    """The highest bound that can be proved, in time linear in the graph."""
    nodes = problem.graph.nodes
    heads, tails = _chains(problem)
    forward = np.asarray([node.forward_s for node in nodes])
    first = np.asarray([node.backward_input_s for node in nodes])
    both = first + [node.backward_weight_s for node in nodes]
    # Where halves are jobs of their own, the weight gradient may come after the chain has gone on.
    chain = first if problem.is_split else both
    optimizer = np.zeros(len(nodes))
    owners: dict[int, float] = {}
    seen: set[tuple[int, int]] = set()
    for index, use in problem.uses:
        lasts = owners.setdefault(use.owner, use.optimizer_s)  # as everywhere, the first use tells what all are
        if (index, use.owner) not in seen:
            optimizer[index] += lasts
            seen.add((index, use.owner))
    number, ranks = problem.num_microbatches, problem.num_ranks
    work = number * float((forward + both).sum()) + float(np.sort(heads)[:ranks].sum())
    # The last job of a rank may be a weight gradient: then no chain of others need follow.
    after = 0.0 if problem.is_split else float(np.sort(tails)[:ranks].sum())
    node = heads + number * (forward + both)
    node = node + (optimizer if problem.is_split else np.maximum(tails, optimizer))
    bounds = {
        BoundKind.WORK: (work + max(sum(owners.values()), after)) / ranks,
        BoundKind.PATH: float((heads + forward + chain + tails).max(initial=0.0)),
        BoundKind.NODE: float(node.max(initial=0.0)),
    }
    kind = max(bounds, key=lambda kind: bounds[kind])
    return LowerBound(seconds=bounds[kind], kind=kind)


def _chains(problem: Problem) -> tuple[Floats, Floats]:
    """For each operation, the longest chain of forwards before it, and of gradients behind its own."""
    nodes = problem.graph.nodes
    heads, tails = np.zeros(len(nodes)), np.zeros(len(nodes))
    by_reader: list[list[tuple[int, bool]]] = [[] for _ in nodes]
    for value in problem.graph.values:
        for reader in value.readers:
            by_reader[reader].append((value.producer, value.gradient_bytes > 0))
    for reader, reads in enumerate(by_reader):
        for producer, has_grad in reads:
            node = nodes[producer]
            heads[reader] = max(heads[reader], heads[producer] + node.forward_s)
            if has_grad:
                gradient_s = node.backward_input_s if problem.is_split else node.backward_s
                tails[reader] = max(tails[reader], tails[producer] + gradient_s)
    return heads, tails
