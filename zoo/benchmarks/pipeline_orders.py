"""The orders of the known families as lists of actions ("2F0": stage 2, forward, micro-batch 0), one list a rank.

Models: gpipe, and the looped 1F1B order with prefetch; 1F1B is one loop without prefetch, Megatron's interleaved order
is blocks of as many micro-batches as ranks with the most prefetch. Stage s lives on rank s mod D.
Ignores: whether an order can run; the simulator says so. Written apart from the package, whose orders it judges.

Legend: D ranks, M micro-batches, v loops, L micro-batches per loop, P prefetched forwards; r is a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Orders", "Parameters", "gpipe", "looped", "round_robin", "split_backward"]

Orders = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What a looped order follows from, beside the numbers of ranks and micro-batches."""

    loops: int
    per_loop: int
    prefetch: int

    def __str__(self) -> str:
        """As the tables show it: (v,L,P)."""
        return f"({self.loops},{self.per_loop},{self.prefetch})"


def round_robin(ranks: int, loops: int) -> tuple[int, ...]:
    """The rank of each stage where stage s lives on rank s mod D."""
    return tuple(stage % ranks for stage in range(ranks * loops))


def gpipe(ranks: int, microbatches: int, loops: int = 1) -> Orders:
    """All forwards, stage by stage, then all backwards."""
    return tuple(
        (
            *_walk("F", range(rank, ranks * loops, ranks), microbatches, microbatches),
            *_walk("B", range(rank, ranks * loops, ranks)[::-1], microbatches, microbatches),
        )
        for rank in range(ranks)
    )


def looped(ranks: int, microbatches: int, parameters: Parameters) -> Orders:
    """The looped order: W_r - 1 forwards first, W_r = (v-1)·L + (D-r) + min(D-r-1, P), then one and one in turn."""
    return tuple(_looped_rank(ranks, rank, microbatches, parameters) for rank in range(ranks))


def _looped_rank(ranks: int, rank: int, microbatches: int, parameters: Parameters) -> tuple[str, ...]:
    stages = range(rank, ranks * parameters.loops, ranks)
    forwards = list(_walk("F", stages, microbatches, parameters.per_loop))
    backwards = list(_walk("B", stages[::-1], microbatches, parameters.per_loop))
    behind = ranks - rank - 1
    warm_up = (parameters.loops - 1) * parameters.per_loop + behind + min(behind, parameters.prefetch)
    order = forwards[:warm_up]
    for index, forward in enumerate(forwards[warm_up:]):
        order += (forward, backwards[index])
    return (*order, *backwards[max(0, len(forwards) - warm_up) :])


def _walk(letter: str, stages: range, microbatches: int, block: int) -> Iterator[str]:
    for first in range(0, microbatches, block):
        for stage in stages:
            for microbatch in range(first, min(first + block, microbatches)):
                yield f"{stage}{letter}{microbatch}"


def split_backward(orders: Orders) -> Orders:
    """The same orders, each backward as its two halves, one directly after the other."""
    return tuple(tuple(half for action in order for half in _halves(action)) for order in orders)


def _halves(action: str) -> tuple[str, ...]:
    return (action.replace("B", "I"), action.replace("B", "W")) if "B" in action else (action,)
