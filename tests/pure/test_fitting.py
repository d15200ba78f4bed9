"""Memory: plans fit, recomputation where it is allowed, and refusals that say by how much and what would help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.planner import Problem, SearchOptions, make_plan
from pfeife_accelerate.planner.explain import _smaller_microbatches
from tests.cost_graphs import chain, machine, node, random_cost_graph, use
from tests.pure.test_search import sound_plan

HEAVY = chain([node(saved=100, workspace=5, params=(use(i, 10),)) for i in range(8)])


def refused(graph, where, ranks=2, microbatches=8, **options):
    with pytest.raises(PfeifeError, match="PF302") as error:
        make_plan(graph, where, ranks, microbatches, SearchOptions(**options))
    return error.value


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_memory_forbids_what_would_be_faster():
    graph = chain([node(saved=100)] * 8)
    free = sound_plan(graph, machine(latency_s=5.0), microbatches=8)
    # 1F1B without prefetch holds two micro-batches on rank 0: 2 * 4 * 100 bytes.
    tight = sound_plan(graph, machine(latency_s=5.0, memory_bytes=900), microbatches=8)
    assert max(free.peak_bytes) > 810 >= max(tight.peak_bytes)
    assert tight.estimate_s > free.estimate_s


@pytest.mark.parametrize("effort", ["full", "quick"])
def test_cuts_by_memory_are_the_way_out(effort):
    """The first two operations take nearly all the time; equal time would leave all other parameters to one rank."""
    graph = chain([node(10.0 if i < 2 else 0.1, params=(use(i, 4),)) for i in range(8)])
    assert sound_plan(graph, microbatches=1, num_loops=1, effort=effort).estimate_s > 0
    tight = sound_plan(graph, machine(memory_bytes=80), microbatches=1, num_loops=1, effort=effort)
    assert tight.cuts == (4,)


@pytest.mark.parametrize("memory", [(4200, 1500), (1500, 4200), (1500, 1500, 2600)])
def test_devices_of_different_memory_are_each_kept_within_theirs(memory):
    where = machine(memory_bytes=memory)
    planned = sound_plan(HEAVY, where, ranks=len(memory), microbatches=6)
    assert [item.limit_bytes for item in planned.memory] == [int(size * 0.9) for size in memory]
    with_least = make_plan(HEAVY, machine(memory_bytes=max(memory)), len(memory), 6)
    assert with_least.estimate_s <= planned.estimate_s * (1 + 1e-9)


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("effort", ["full", "quick"])
def test_fewer_micro_batches_alive_than_in_any_family_are_the_way_out(backward, effort):
    """1F1B keeps four micro-batches on rank 0; here each rank has room for one and its two operations."""
    graph = chain([node(saved=100, params=(use(i, 10),)) for i in range(8)])
    options = {"memory_fraction": 1.0, "backward": backward, "effort": effort}
    planned = sound_plan(graph, machine(memory_bytes=2 * (100 + 40)), ranks=4, microbatches=6, **options)
    assert planned.cuts == (2, 4, 6) and set(planned.peak_bytes) == {280}
    roomier = sound_plan(graph, machine(memory_bytes=4 * 140), ranks=4, microbatches=6, **options)
    assert roomier.estimate_s < planned.estimate_s
    assert refused(graph, machine(memory_bytes=279), 4, 6, memory_fraction=1.0).hints[-1] == "8 processes"


def test_unequal_operations_are_cut_by_the_memory_that_few_micro_batches_need():
    sizes = (300, 10, 10, 10, 100, 100, 100, 290)
    graph = chain([node(10.0 if size == 10 else 1.0, saved=size) for size in sizes])
    planned = sound_plan(graph, machine(memory_bytes=330), ranks=4, microbatches=6, memory_fraction=1.0)
    assert max(planned.peak_bytes) <= 330


# -- recomputation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "limit_bytes"),
    [
        # A rank has 160 bytes of parameters with their states, and 400 of activations for each micro-batch.
        ({}, 540),
        ({"backward": "split", "num_loops": 2}, 540),
        ({"cuts": (4,), "schedule": "1f1b"}, 600),
        ({"schedule": "gpipe"}, 540),
        ({"schedule": "zb-h1"}, 600),
        ({"backward": "split", "effort": "quick"}, 540),
    ],
)
def test_recomputation_makes_a_small_memory_do(options, limit_bytes):
    where = machine(memory_bytes=-(-limit_bytes * 10 // 9))
    refused(HEAVY, where, **options)
    planned = sound_plan(HEAVY, where, microbatches=8, recompute="auto", **options)
    assert planned.recompute
    assert list(planned.recompute) == sorted(set(planned.recompute))
    assert set(planned.recompute) <= set(range(len(planned.stages)))
    for stage in planned.recompute:
        assert planned.stages[stage].backward_s > 2 * planned.stages[stage].forward_s
        assert planned.stages[stage].saved_bytes <= 1


def test_recomputation_is_chosen_where_less_memory_alive_would_be_slower():
    graph = chain([node(saved=100, params=(use(i, 1),)) for i in range(16)])
    where = machine(memory_bytes=860)
    fits = sound_plan(graph, where, ranks=4, microbatches=8, memory_fraction=1.0)
    free = sound_plan(graph, where, ranks=4, microbatches=8, memory_fraction=1.0, recompute="auto")
    assert free.recompute and free.estimate_s < fits.estimate_s


def test_nothing_is_recomputed_where_everything_fits():
    free = make_plan(HEAVY, machine(), 2, 4)
    allowed = make_plan(HEAVY, machine(), 2, 4, SearchOptions(recompute="auto"))
    assert allowed.recompute == ()
    assert allowed.estimate_s == free.estimate_s


def test_no_more_is_recomputed_than_is_needed():
    """All four stages would make room; on rank 1 there is enough without."""
    graph = chain([node(saved=100)] * 4)
    roomy = 10**6
    planned = sound_plan(
        graph, machine(memory_bytes=(560, roomy)), microbatches=6, schedule="gpipe", num_loops=2, recompute="auto"
    )
    assert set(planned.recompute) <= {0, 2}
    assert planned.recompute


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_refusal_says_by_how_much_on_which_rank():
    error = refused(chain([node(saved=100, params=(use(i, 4),)) for i in range(8)]), machine(memory_bytes=100))
    lines = str(error).splitlines()
    assert lines[0] == "PF302 no plan fits into memory; the nearest one exceeds it on 2 of 2 ranks"
    for rank, line in enumerate(lines[1:3]):
        found = re.fullmatch(
            rf"  rank {rank} needs (\d+) bytes \((\d+) parameters, (\d+) gradients and optimizer state, "
            r"(\d+) activations, (\d+) workspace, (\d+) messages\), may use 90: (\d+) too many",
            line,
        )
        peak, *parts, excess = map(int, found.groups())
        assert peak == sum(parts) == 90 + excess
        assert excess > 0
    assert lines[3].startswith("  why    all stages together need ")


def test_only_ranks_that_exceed_their_memory_are_named():
    error = refused(HEAVY, machine(memory_bytes=(10**6, 100)), schedule="1f1b")
    assert error.what.endswith("on 1 of 2 ranks")
    assert error.where.startswith("rank 1 needs")
    # Nobody knows which device a further process would have.
    assert not any("processes" in hint for hint in error.hints)


def test_nothing_helps_where_one_operation_is_too_large():
    graph = chain([node(params=(use(0, 1000),)), node()])
    assert refused(graph, machine(memory_bytes=100)).hints == (
        "a device with more memory, or a smaller model: one operation alone needs 4000 bytes",
    )


def follow(hint, graph, where, ranks, microbatches, options):
    """The plan after the change that a hint names."""
    numbers = [int(number) for number in re.findall(r"\d+", hint)]
    if hint == "recomputation of activations (recompute: auto)":
        return make_plan(graph, where, ranks, microbatches, replace(options, recompute="auto"))
    if re.fullmatch(r"\d+ processes", hint):
        return make_plan(graph, where, numbers[0], microbatches, options)
    assert re.fullmatch(r"\d+ micro-batches, each \d+ times smaller", hint)
    problem = Problem(graph=graph, machine=where, num_ranks=ranks, num_microbatches=microbatches, options=options)
    return make_plan(_smaller_microbatches(problem, numbers[1]).graph, where, ranks, numbers[0], options)


WISHES = (
    {},
    {"backward": "split"},
    {"recompute": "auto"},
    {"schedule": "gpipe"},
    {"schedule": "looped", "num_loops": 2},
    {"schedule": "zb-v"},
    {"prefetch_forwards": 1},
    {"microbatches_per_loop": 1},
)


@pytest.mark.parametrize("seed", range(16))
def test_every_change_that_a_refusal_names_does_fit(seed):
    graph = random_cost_graph(seed, least=7, most=9, connected=True)
    ranks, microbatches = (2, 2, 3)[seed % 3], (1, 2, 4)[seed % 4 % 3]
    options = SearchOptions(**WISHES[seed % len(WISHES)], effort="quick" if seed % 2 else "full")
    try:
        free = make_plan(graph, machine(), ranks, microbatches, options)
    except PfeifeError as error:
        assert error.id == "PF301"
        pytest.skip("too few cuts")
    where = machine(memory_bytes=int(max(free.peak_bytes) * (0.35, 0.6, 0.8)[seed % 3]))
    try:
        planned = make_plan(graph, where, ranks, microbatches, options)
        assert all(item.excess_bytes <= 0 for item in planned.memory)
    except PfeifeError as error:
        assert error.id == "PF302"
        for hint in error.hints:
            if not hint.startswith("a device with more memory"):
                assert follow(hint, graph, where, ranks, microbatches, options).estimate_s >= 0


def test_each_change_is_named_where_it_helps():
    assert refused(HEAVY, machine(memory_bytes=600)).hints == (
        "recomputation of activations (recompute: auto)",
        "16 micro-batches, each 2 times smaller",
        "3 processes",
    )
    parameters = chain([node(params=(use(i, 10),)) for i in range(8)])
    assert refused(parameters, machine(memory_bytes=100)).hints == ("4 processes",)
