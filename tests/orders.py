"""Orders and placements that no generator of ours makes: any order in which dependencies are met will do."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any


def random_order(
    stage_ranks: Sequence[int], num_microbatches: int, seed: int, *, is_split: bool = False
) -> list[list[str]]:
    """Forwards and backwards of a chain of stages, in a random possible order, as a plan writes them for each rank.

    `is_split`: backwards come in halves, the second one at any time after the first.
    """
    chance = random.Random(seed)
    num_stages = len(stage_ranks)
    chains = [
        [f"{stage}F{m}" for stage in range(num_stages)] + [f"{stage}B{m}" for stage in reversed(range(num_stages))]
        for m in range(num_microbatches)
    ]
    if is_split:
        for m, chain in enumerate(chains):
            chain[num_stages:] = [action.replace("B", "I") for action in chain[num_stages:]]
            for stage in range(num_stages):
                after = chain.index(f"{stage}I{m}") + 1
                chain.insert(chance.randint(after, len(chain)), f"{stage}W{m}")
    per_rank: list[list[str]] = [[] for _ in range(max(stage_ranks) + 1)]
    while any(chains):
        action = chance.choice([chain for chain in chains if chain]).pop(0)
        stage = int(re.split("[FBIW]", action)[0])
        per_rank[stage_ranks[stage]].append(action)
    return per_rank


def random_placement(num_ranks: int, num_stages: int, seed: int) -> tuple[int, ...]:
    """A rank for each stage, every rank having at least one."""
    chance = random.Random(seed)
    ranks = [*range(num_ranks), *(chance.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    chance.shuffle(ranks)
    return tuple(ranks)


def turn_into_a_v(plan: dict[str, Any]) -> None:
    """Let a plan of 4 stages on 2 ranks, as JSON, go there and back, in an order of its own."""
    plan["stage_ranks"] = [0, 1, 1, 0]
    plan["per_rank"] = random_order(plan["stage_ranks"], plan["spec"]["num_microbatches"], seed=3)
