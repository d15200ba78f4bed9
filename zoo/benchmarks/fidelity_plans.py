"""Plans that no planner would make: stages on any ranks, actions in any order that can run, activations twice.

Models: the cuts of the plan that was made, with its stages elsewhere and another order. Ignores: how slow that is.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any


def turned(kind: str, plan: Any) -> Any:
    """The plan with its stages on other ranks: there and back ("v"), there and back again ("wave"), anywhere
    ("scattered"), or on all ranks but one ("idle"). The order is random but for the "v", whose order is by stage.
    Or as it is with all stages ("recomputed") or every second one ("half_recomputed") computing activations again.
    """
    if kind.endswith("recomputed"):
        return replace(plan, recompute=tuple(range(0, plan.num_stages, 2 if kind.startswith("half") else 1)))
    stage_ranks = _placement(kind, plan.num_ranks, plan.num_stages)
    chains = [
        [f"{stage}F{m}" for stage in range(plan.num_stages)]
        + [f"{stage}B{m}" for stage in range(plan.num_stages)][::-1]
        for m in range(plan.spec.num_microbatches)
    ]
    per_rank: list[list[str]] = [[] for _ in range(plan.num_ranks)]
    chance = random.Random(plan.graph_fingerprint)
    while any(chains):
        longest = max(len(chain) for chain in chains)
        ready = [chain for chain in chains if len(chain) == longest or (chain and kind != "v")]
        action = chance.choice(ready).pop(0)
        per_rank[stage_ranks[int(action.replace("B", "F").split("F")[0])]].append(action)
    return replace(plan, stage_ranks=stage_ranks, per_rank=tuple(map(tuple, per_rank)))


def _placement(kind: str, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    chance = random.Random(num_stages)
    there = list(range(num_ranks))
    ranks: list[int] = []
    while len(ranks) < num_stages:
        if kind == "scattered":
            chance.shuffle(there)
        ranks += there
        there.reverse()
    ranks = ranks[:num_stages]
    if kind == "scattered":
        ranks[-1] = 1 % num_ranks
    if kind == "idle":
        ranks = [max(rank, 1) for rank in ranks]
    return tuple(ranks)
