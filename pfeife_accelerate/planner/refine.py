"""Better cuts for an order: descent over moves of one cut, of many, and of time from one stage to another.

A slicing's time is the longest of many paths. A move that lengthens the path that is longest now cannot help, whatever
it does to the others: only moves that shorten it are valued, all of them in one pass over arrays. The best are merged
where they touch different cuts. At a local optimum the cuts are shaken, by random numbers that are the same in every
run.

Models: cuts at the problem's positions. Ignores: other orders, placements, numbers of stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pfeife_accelerate.planner.problem import Floats, Ints
from pfeife_accelerate.planner.valuation import MISFIT_S, Valuation

__all__ = ["Refined", "kicked", "refine", "shake"]

_STEPS = (1, 2, 3, 5, 8, 13, 21, 34)
_SHARES = (0.03, 0.1, 0.2, 0.4, 0.8)  # of a mean stage's time, moved from one stage to another
_ENDS = 6  # stages looked at as givers, and as takers
_MERGED = 40
_GROUP = 64
_MOST_MOVES = 160
_SHORT = 2
_RANGE = 3.0  # of the sizes of kicks, as a logarithm
_MOST_KICKED = 0.5  # of a mean stage's time
_LEAST_GAIN = 1e-7


@dataclass(frozen=True, kw_only=True)
class Refined:
    """Cuts and what they are worth."""

    cuts: Ints
    value: float


def refine(valuation: Valuation, cuts: Ints, *, rounds: int = 60) -> Refined:
    """Descend from `cuts` until no move helps, the rounds are over, or the effort is spent."""
    positions = valuation.problem.positions
    index = np.searchsorted(positions, cuts).clip(max=max(len(positions) - 1, 0))
    value = float(valuation.values(positions[index][None])[0])
    if not np.isfinite(value) or not len(index):
        return Refined(cuts=positions[index], value=value)
    for _ in range(rounds):
        moved = None if valuation.effort.is_spent else _round(valuation, index, value)
        if moved is None:
            break
        index, value = moved
    return Refined(cuts=positions[index], value=value)


def shake(valuation: Valuation, best: Refined, generator: np.random.Generator, *, rounds: int = 8) -> Refined:
    """Move a few cuts at random, descend from there, and keep what is better."""
    positions = valuation.problem.positions
    index = np.searchsorted(positions, best.cuts)
    if not len(index):
        return best
    moved = index.copy()
    for cut in generator.choice(len(index), size=min(len(index), int(generator.integers(1, 4))), replace=False):
        moved[cut] += int(generator.integers(1, 9)) * int(generator.choice((-1, 1)))
    moved = np.sort(moved.clip(0, len(positions) - 1))
    if not (np.diff(moved) > 0).all():
        return best
    found = refine(valuation, positions[moved], rounds=rounds)
    return found if found.value < best.value * (1 - _LEAST_GAIN) else best


def kicked(valuation: Valuation, cuts: Ints, generator: np.random.Generator) -> Ints | None:
    """The cuts after a random part of a stage's time went from one stage to another; None where that is not possible.

    Stages that are often on the longest path give rather than take. All cuts between the two shift: the order no longer
    suits them, so it is to be made anew before they are judged.
    """
    problem = valuation.problem
    positions = problem.positions
    here = problem.work_s[positions]
    moved = np.searchsorted(positions, cuts)
    if not len(moved):
        return None
    weight = np.sum(_path_weights(valuation, moved), axis=0) + 1.0
    giver = int(generator.choice(len(weight), p=weight / weight.sum()))
    ease = 1 / weight
    ease[giver] = 0.0
    taker = int(generator.choice(len(weight), p=ease / ease.sum()))
    first, last = min(giver, taker), max(giver, taker)
    mean_s = problem.work_s[-1] / len(weight)
    shift = mean_s * _MOST_KICKED * np.exp(-_RANGE * generator.uniform()) * (-1 if giver < taker else 1)
    moved[first:last] = np.searchsorted(here, here[moved[first:last]] + shift)
    moved = np.sort(moved.clip(0, len(positions) - 1))
    return positions[moved] if (np.diff(moved) > 0).all() else None


def _round(valuation: Valuation, index: Ints, value: float) -> tuple[Ints, float] | None:
    """One round of moves from `index`; None where none helps."""
    before = value
    positions = valuation.problem.positions
    weights = _path_weights(valuation, index) if value < MISFIT_S else None
    candidates = np.concatenate((_single_moves(valuation, index, weights), _transfers(valuation, index, weights)))
    if not len(candidates):
        return None
    # Not all are needed: the first group with something better in it will do. Groups are mixed, but always the same.
    candidates = candidates[np.random.default_rng(len(candidates)).permutation(len(candidates))]
    for first in range(0, len(candidates), _GROUP):
        group = candidates[first : first + _GROUP]
        values = valuation.values(positions[group])
        by_value = np.argsort(values, kind="stable")
        better = [int(i) for i in by_value if values[i] < before * (1 - _LEAST_GAIN)][:_MERGED]
        if not better:
            continue
        merged = _merged(index, group[better])
        best = merged[int(valuation.values(positions[merged]).argmin())]
        value = float(valuation.values(positions[best][None])[0])
        if value < before:
            return best, value
    return None


def _path_weights(valuation: Valuation, index: Ints) -> tuple[Floats, Floats, Floats]:
    """How often each stage's forward, input and weight gradient are on the longest path."""
    slices = valuation.slices(valuation.problem.positions[index][None])
    graph = valuation.graph(slices.messages)
    valuation.effort.spend(1e-3 + 4e-6 * graph.num_levels)
    rows = graph.critical_rows(slices.durations_for(graph.messages), slices.optimizer_s)
    stages = valuation.order.num_stages
    # Micro-batches that are left out pass through the busiest rank.
    busiest = slices.stage_ranks == slices.rank_work_s[:, 0].argmax()
    beyond = valuation.problem.num_beyond * busiest
    forward, first = rows[:stages] + beyond, rows[stages : 2 * stages] + beyond
    return forward, first, rows[2 * stages : 3 * stages] + beyond if valuation.order.is_split else first


def _single_moves(valuation: Valuation, index: Ints, weights: tuple[Floats, Floats, Floats] | None) -> Ints:
    """Each cut moved by some positions, where that shortens the longest path."""
    problem = valuation.problem
    steps = np.asarray([sign * step for step in _STEPS for sign in (-1, 1)])
    target = index[:, None] + steps[None, :]
    low = np.concatenate(([-1], index[:-1]))[:, None]
    high = np.concatenate((index[1:], [len(problem.positions)]))[:, None]
    is_useful = (target > low) & (target < high)
    if weights is not None:
        gain = np.zeros(target.shape)
        inside = target.clip(0, len(problem.positions) - 1)
        for weight, prefix in zip(
            weights, (problem.forward_s, problem.backward_input_s, problem.backward_weight_s), strict=True
        ):
            here = prefix[problem.positions]
            gain += (here[inside] - here[index][:, None]) * (weight[:-1] - weight[1:])[:, None]
        is_useful &= gain < 0
    cut, step = np.nonzero(is_useful)
    if weights is not None and len(cut) > _MOST_MOVES:
        # The shortest steps, and of the others those that promise most.
        promise = np.where(np.abs(steps)[step] <= _SHORT, -np.inf, gain[cut, step])
        chosen = np.sort(np.argsort(promise, kind="stable")[:_MOST_MOVES])
        cut, step = cut[chosen], step[chosen]
    moved = np.repeat(index[None], len(cut), axis=0)
    moved[np.arange(len(cut)), cut] = target[cut, step]
    return moved


def _transfers(valuation: Valuation, index: Ints, weights: tuple[Floats, Floats, Floats] | None) -> Ints:
    """Time moved from stages that are often on the longest path to those that are not; all cuts between shift."""
    if weights is None or len(index) < 2:
        return np.empty((0, len(index)), dtype=np.int64)
    problem = valuation.problem
    here = problem.work_s[problem.positions]
    weight = weights[0] + weights[1] + weights[2]
    giving = np.argsort(-weight, kind="stable")[:_ENDS]
    taking = np.argsort(weight, kind="stable")[:_ENDS]
    mean_s = problem.work_s[-1] / valuation.order.num_stages
    found = []
    for giver in giving.tolist():
        for taker in taking.tolist():
            first, last = min(giver, taker), max(giver, taker)
            shift = np.asarray(_SHARES) * mean_s * (-1 if giver < taker else 1)
            between = np.searchsorted(here, here[index[first:last]][None, :] + shift[:, None])
            moved = np.repeat(index[None], len(_SHARES), axis=0)
            moved[:, first:last] = between.clip(0, len(problem.positions) - 1)
            found.append(moved)
    table = np.unique(np.concatenate(found), axis=0)
    table = table[(np.diff(table, axis=1) > 0).all(axis=1)]
    return table[(table != index).any(axis=1)]


def _merged(index: Ints, better: Ints) -> Ints:
    """The best move, with the next ones added as long as they touch other cuts: every stage of that."""
    merged = [better[0]]
    current = better[0].copy()
    for move in better[1:]:
        changed = np.flatnonzero(move != index)
        if (current[changed] == index[changed]).all():
            candidate = current.copy()
            candidate[changed] = move[changed]
            if (np.diff(candidate) > 0).all():
                current = candidate
                merged.append(current)
    return np.stack(merged)
