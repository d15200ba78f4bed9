"""The event simulator against a second way to the same times, on random graphs, cuts, placements and orders.

A link's messages leave in the order of the jobs that cause them, and one rank's jobs run in a known order: so the order
of everything on ranks and links is known before the times are, and the times are the least solution of equations.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from event_simulator import simulate
from random_graphs import random_machine, small_graph


def stages_of(cuts, num_ops):
    return [sum(cut <= node for cut in cuts) for node in range(num_ops)]


def messages_of(graph, stage_of, stage_ranks):
    """(producing stage, rank, first reader) -> tensors, as (bytes, gradient bytes, reading stages there)."""
    found = defaultdict(list)
    for value in graph.values:
        producer = stage_of[value.producer]
        for rank in set(stage_ranks) - {stage_ranks[producer]}:
            there = {stage_of[node] for node in value.readers if stage_ranks[stage_of[node]] == rank}
            if there:
                found[producer, rank, min(there)].append((value.num_bytes, value.gradient_bytes, there))
    return found


def equations(graph, machine, cuts, stage_ranks, per_rank):
    """thing -> (seconds it takes, the things before it); a thing is an action or a message of a micro-batch."""
    stage_of = stages_of(cuts, len(graph.nodes))
    messages = messages_of(graph, stage_of, stage_ranks)
    nodes = defaultdict(list)
    for node, stage in zip(graph.nodes, stage_of, strict=True):
        nodes[stage].append(node)
    gradient_at = {}  # stage, micro-batch -> the action after which its input gradients exist
    for actions in per_rank:
        for text in actions:
            if text[1] in "BI":
                gradient_at[int(text[0]), int(text[2])] = text
    things, on_link = {}, defaultdict(list)
    for rank, actions in enumerate(per_rank):
        sent, before = set(), []
        for text in actions:
            stage, letter, microbatch = int(text[0]), text[1], int(text[2])
            needs = list(before)
            if letter == "F":
                needs += [("there", key, microbatch) for key, parts in messages.items() if key[1] == rank
                          and any(stage in there for _, _, there in parts)]  # fmt: skip
                needs += [f"{p}F{microbatch}" for p in local_producers(graph, stage_of, stage_ranks, stage)]
            elif letter == "W":
                needs.append(f"{stage}I{microbatch}")
            else:
                needs.append(f"{stage}F{microbatch}")
                needs += [("back", key, microbatch) for key, parts in messages.items()
                          if key[0] == stage and any(gradient for _, gradient, _ in parts)]  # fmt: skip
                needs += [gradient_at[c, microbatch] for c in local_readers(graph, stage_of, stage_ranks, stage)]
            things[text] = (sum(seconds_of(node, letter) for node in nodes[stage]), needs)
            before = [text]
            for key, parts in messages.items():
                if letter == "F" and key[0] == stage:
                    seconds = machine.link_of(rank, key[1]).transfer_s(sum(part[0] for part in parts))
                    add_message(things, on_link[rank, key[1]], ("there", key, microbatch), seconds, text)
                adding = {reader for _, gradient, there in parts if gradient for reader in there}
                if letter in "BI" and key[1] == rank and stage in adding:
                    sent.add((key, microbatch, stage))
                    if all((key, microbatch, reader) in sent for reader in adding):
                        seconds = machine.link_of(rank, stage_ranks[key[0]]).transfer_s(sum(part[1] for part in parts))
                        link = on_link[rank, stage_ranks[key[0]]]
                        add_message(things, link, ("back", key, microbatch), seconds, text)
    return things


def add_message(things, link, name, seconds, cause):
    things[name] = (seconds, [cause, *link[-1:]])
    link.append(name)


def seconds_of(node, letter):
    return {"F": node.forward_s, "B": node.backward_s, "I": node.backward_input_s, "W": node.backward_weight_s}[letter]


def local_producers(graph, stage_of, stage_ranks, stage):
    return {
        stage_of[value.producer]
        for value in graph.values
        if stage in {stage_of[node] for node in value.readers} - {stage_of[value.producer]}
        and stage_ranks[stage_of[value.producer]] == stage_ranks[stage]
    }


def local_readers(graph, stage_of, stage_ranks, stage):
    return {
        stage_of[node]
        for value in graph.values
        if stage_of[value.producer] == stage and value.gradient_bytes
        for node in value.readers
        if stage_of[node] != stage and stage_ranks[stage_of[node]] == stage_ranks[stage]
    }


def solved(things):
    """End of each thing, by going round until nothing changes; None where it goes round for ever."""
    ends = dict.fromkeys(things, 0.0)
    for _ in range(len(things) + 1):
        changed = False
        for name, (seconds, needs) in things.items():
            end = max((ends[need] for need in needs), default=0.0) + max(seconds, 1e-12)
            if end > ends[name] + 1e-13:
                ends[name], changed = end, True
        if not changed:
            return ends
    return None


def an_order(rng, stages, stage_ranks, microbatches, split):
    """Every micro-batch through all stages and back, in turns at random; then some neighbours change places."""
    paths = [
        [f"{stage}F{microbatch}" for stage in range(stages)]
        + [
            f"{stage}{letter}{microbatch}"
            for stage in reversed(range(stages))
            for letter in ("IW" if split[stage] else "B")
        ]
        for microbatch in range(microbatches)
    ]
    per_rank = [[] for _ in range(max(stage_ranks) + 1)]
    while any(paths):
        path = rng.choice([path for path in paths if path])
        action = path.pop(0)
        per_rank[stage_ranks[int(action[0])]].append(action)
    for actions in per_rank:
        for _ in range(rng.choice((0, 0, 0, 0, 1, 3))):
            place = rng.randrange(max(1, len(actions) - 1))
            actions[place : place + 2] = reversed(actions[place : place + 2])
    return per_rank


def a_case(seed):
    """A graph, a machine, cuts, ranks of the stages, and an order of all actions."""
    rng = random.Random(seed)
    graph = small_graph(seed)
    stages = rng.randint(2, min(8, len(graph.nodes)))
    cuts = sorted(rng.sample(range(1, len(graph.nodes)), stages - 1))
    ranks = rng.randint(2, min(3, stages))
    stage_ranks = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(stage_ranks)
    split = [rng.random() < 0.5 for _ in range(stages)]
    per_rank = an_order(rng, stages, stage_ranks, rng.randint(1, 4), split)
    return graph, random_machine(seed), cuts, stage_ranks, per_rank


@pytest.mark.parametrize("seed", range(120))
def test_the_times_are_those_of_the_equations(seed):
    graph, machine, cuts, stage_ranks, per_rank = a_case(seed)
    ends = solved(equations(graph, machine, cuts, stage_ranks, per_rank))
    outcome = simulate(graph, machine, cuts, stage_ranks, per_rank)
    if ends is None:
        assert outcome is None
        return
    assert outcome is not None
    optimizer_s = [0.0] * len(per_rank)
    for node, stage in zip(graph.nodes, stages_of(cuts, len(graph.nodes)), strict=True):
        optimizer_s[stage_ranks[stage]] += sum(use.optimizer_s for use in node.params)
    for rank, actions in enumerate(per_rank):
        expected = max(ends[action] for action in actions) + optimizer_s[rank]
        assert outcome.end_s[rank] == pytest.approx(expected, rel=1e-6)


def test_some_of_these_orders_deadlock_and_most_do_not():
    """So that the test above tests both."""
    deadlocks = sum(simulate(*a_case(seed)) is None for seed in range(120))
    assert 10 < deadlocks < 60
