"""The whole planner: what it promises about any plan, on models of every odd kind; and that wishes are obeyed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.ir import CostGraph, CostValue, ScheduleFamily, ScheduleSpec
from pfeife_accelerate.planner import MessageBytes, Problem, SearchOptions, make_plan, search, simulate
from pfeife_accelerate.planner.slices import Slices
from pfeife_accelerate.planner.starts import starts
from pfeife_accelerate.planner.valuation import Effort
from pfeife_accelerate.schedule import build, for_microbatches, lower
from tests.cost_graphs import chain, machine, node, random_cost_graph, random_machine, use

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from random_graphs import random_graph
from random_graphs import random_machine as random_link


def problem_of(graph, where, ranks, microbatches, options):
    return Problem(graph=graph, machine=where, num_ranks=ranks, num_microbatches=microbatches, options=options)


def assert_sound(planned, graph, where, ranks, microbatches, options):
    """All that is promised about any plan."""
    problem = problem_of(graph, where, ranks, microbatches, options)
    cuts = planned.cuts
    assert set(cuts) <= set(graph.legal_cuts)
    assert list(cuts) == sorted(set(cuts))
    assert planned.schedule.num_ranks == ranks
    assert set(planned.stage_ranks) == set(range(ranks))
    assert len(cuts) + 1 == len(planned.stage_ranks) == len(planned.stages)
    assert planned.schedule.num_microbatches == microbatches
    slices = Slices(problem, np.asarray([cuts], dtype=np.int64).reshape(1, -1), planned.stage_ranks, planned.recompute)
    sizes = tuple(
        MessageBytes(forward_bytes=round(a), gradient_bytes=round(b))
        for a, b in zip(*(side[:, 0].tolist() for side in slices.message_bytes), strict=True)
    )
    timeline = simulate(lower(planned.schedule, slices.messages), planned.stages, slices.messages, sizes, where)
    ends = [
        max(i.end_s for i in timeline.intervals if i.rank == rank and i.action.kind.is_compute) + step
        for rank, step in enumerate(slices.optimizer_s[:, 0].tolist())
    ]
    assert planned.estimate_s == pytest.approx(max(ends))
    assert planned.timeline == timeline
    assert 0 <= planned.lower_bound_s <= planned.estimate_s * (1 + 1e-9)
    assert all(memory.excess_bytes <= 0 for memory in planned.memory)
    for rank, peak in enumerate(planned.peak_bytes):
        assert peak <= where.device_of(rank).memory_bytes * options.memory_fraction
    for number in range(1, microbatches + 3):
        lower(for_microbatches(planned.schedule, number), slices.messages)
    for other in planned.runners_up:
        assert other.why
        assert "\n" not in other.why
    return planned


def sound_plan(graph, where=None, ranks=2, microbatches=4, **options):
    where = where or machine()
    chosen = SearchOptions(**options)
    return assert_sound(make_plan(graph, where, ranks, microbatches, chosen), graph, where, ranks, microbatches, chosen)


def best_start_s(graph, where, ranks, microbatches, **options):
    problem = problem_of(graph, where, ranks, microbatches, SearchOptions(**options))
    return min(start.value for start in starts(problem, Effort(left_s=float("inf"))))


def parallel_branches():
    """An input for two towers that only the last operation joins."""
    edges = [(0, (1, 5)), *((i, (i + 1,)) for i in (1, 2, 3, 5, 6, 7)), (4, (9,)), (8, (9,))]
    values = tuple(CostValue(producer=p, readers=r, num_bytes=3, gradient_bytes=3) for p, r in sorted(edges))
    return CostGraph(name="towers", nodes=tuple(node(1.0 + i % 3, saved=5) for i in range(10)), values=values)


def tied_ends():
    """An embedding and a head that share a heavy parameter."""
    heavy = use(0, 100, optimizer_s=0.5)
    middle = [node(1.0, saved=4, params=(use(i, 10, optimizer_s=0.1),)) for i in range(1, 8)]
    return chain([node(0.1, saved=4, params=(heavy,)), *middle, node(4.0, saved=4, params=(heavy,))])


FROZEN = node(1.0, backward=(0.0, 0.0))
ODD = {
    "a frozen prefix": chain([FROZEN] * 4 + [node(saved=3)] * 5, frozen=4),
    "frozen but for the first": chain([node(), *[node(backward=(1.0, 0.0))] * 9]),
    "free operations": chain([node(float(i % 4 == 0)) for i in range(9)]),
    "nothing takes time": chain([node(0.0)] * 9),
    "no bytes anywhere": chain(9, num_bytes=0),
    "no messages at all": CostGraph(name="apart", nodes=(node(),) * 8, values=()),
    "all equal": chain([node(1.0, saved=1)] * 9),
    "one operation of 90 percent": chain([node(1.0)] * 5 + [node(90.0)] + [node(1.0)] * 5),
    "tied embedding and head": tied_ends(),
    "branches beside each other": parallel_branches(),
    "runs that cannot be cut": chain([node(cut=i % 5 == 0) for i in range(25)]),
    "as many operations as ranks": chain(2),
    "skips over everything": chain(9, skips=[(0, 8), (1, 7), (2, 6)], num_bytes=5),
}


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("name", ODD)
def test_plans_for_odd_models_keep_every_promise(name, backward):
    graph = ODD[name]
    slow = machine(latency_s=0.1, bytes_per_s=20.0, action_s=0.05)
    where, effort = (slow, "full") if backward == "whole" else (machine(), "quick")
    planned = sound_plan(graph, where, backward=backward, effort=effort)
    assert planned.estimate_s <= best_start_s(graph, where, 2, 4, backward=backward) * (1 + 1e-7)


@pytest.mark.parametrize("seed", range(22))
def test_plans_for_random_models_keep_every_promise_and_beat_every_start(seed):
    ranks, microbatches = (2, 3, 4, 1)[seed % 4], 1 + seed % 5
    graph, where = random_cost_graph(seed, least=6, most=9, connected=seed % 3 == 0), random_machine(seed, ranks)
    if len(graph.legal_cuts) + 1 < ranks:
        pytest.skip("too few cuts")
    options = {"backward": ("whole", "split")[seed % 2], "effort": ("full", "quick")[seed // 2 % 2]}
    planned = sound_plan(graph, where, ranks, microbatches, **options)
    assert planned.estimate_s <= best_start_s(graph, where, ranks, microbatches, **options) * (1 + 1e-7)


@pytest.mark.parametrize("seed", [2, 4, 5])
def test_plans_for_models_of_real_kinds_keep_every_promise_and_beat_every_start(seed):
    graph, where = random_graph(seed), random_link(seed)
    planned = sound_plan(graph, where, 3, 4)
    assert planned.estimate_s <= best_start_s(graph, where, 3, 4) * (1 + 1e-7)


def test_one_rank_takes_its_work_and_nothing_else():
    planned = sound_plan(chain(6), ranks=1)
    assert planned.estimate_s == planned.lower_bound_s == 4 * 18.0
    assert planned.gap == 0.0


def test_one_micro_batch_takes_one_pass():
    planned = sound_plan(chain(8), ranks=4, microbatches=1)
    assert planned.estimate_s == planned.lower_bound_s == 24.0


def test_a_dominant_operation_is_alone():
    planned = sound_plan(ODD["one operation of 90 percent"], ranks=3)
    assert (5, 6) in zip((0, *planned.cuts), (*planned.cuts, 11), strict=True)
    assert planned.lower_bound.kind.value == "node"
    assert planned.gap < 0.02


# -- ever the same -----------------------------------------------------------------------------------------------------


def described(planned):
    """A plan as text, down to the last digit."""
    rows = [" ".join(map(str, actions)) for actions in planned.schedule.per_rank]
    others = [(other.family, other.estimate_s, other.why) for other in planned.runners_up]
    return repr((planned.cuts, planned.stage_ranks, rows, planned.estimate_s, planned.peak_bytes, others))


def answers():
    """Three plans: one searched for, one with halves, one that recomputes."""
    graph, where = random_graph(2), random_link(2)
    heavy = chain([node(saved=100, params=(use(i, 10),)) for i in range(8)])
    return [
        described(make_plan(graph, where, 2, 4)),
        described(make_plan(graph, where, 2, 4, SearchOptions(backward="split", effort="quick"))),
        described(make_plan(heavy, machine(memory_bytes=600), 2, 8, SearchOptions(recompute="auto"))),
    ]


@pytest.fixture(scope="module")
def known_answers():
    return answers()


def test_the_same_question_has_the_same_answer(known_answers):
    assert answers() == known_answers
    assert len(set(known_answers)) == 3


def test_another_process_gives_the_same_answer_and_needs_no_torch(known_answers):
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['accelerate'] = None\n"
        "from tests.pure import test_search\n"
        "print(*test_search.answers(), sep='\\n')"
    )
    root = Path(__file__).parents[2]
    environment = {"PYTHONHASHSEED": "4242", "PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == known_answers


# -- choices -----------------------------------------------------------------------------------------------------------


def test_looping_is_chosen_where_it_shortens_the_ramp():
    planned = sound_plan(chain(16), ranks=4, microbatches=8, schedule="looped")
    assert planned.schedule.spec.num_loops > 1


def test_looping_is_left_where_transfers_cost_more():
    planned = sound_plan(chain(16), machine(latency_s=20.0), ranks=4)
    assert planned.schedule.spec.num_loops == 1


def test_looping_is_left_where_actions_cost_the_host_more():
    host = machine(action_s=3.0, runs_ahead=False)
    assert sound_plan(chain(8), host, ranks=2).schedule.spec.num_loops == 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 6), (3, 9)])
def test_of_equally_fast_orders_the_one_with_less_memory_wins(ranks, microbatches):
    """gpipe keeps all micro-batches and is no faster."""
    graph = chain([node(saved=100)] * ranks)
    planned = sound_plan(graph, ranks=ranks, microbatches=microbatches, effort="quick")
    kept = [memory.activation_bytes for memory in planned.memory]
    assert kept == [100 * min(ranks - rank, microbatches) for rank in range(ranks)]


def test_split_backwards_are_no_slower_and_fill_the_ramp():
    graph = chain(16)
    whole, split = (sound_plan(graph, ranks=4, microbatches=4, backward=b) for b in ("whole", "split"))
    assert split.estimate_s < whole.estimate_s
    assert any(action.kind.value == "W" for action in split.schedule.per_rank[0])
    assert not any(action.kind.value == "W" for actions in whole.schedule.per_rank for action in actions)


# -- wishes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "spec"),
    [
        ({"schedule": "GPipe", "num_loops": 2}, {"family": "gpipe", "num_loops": 2}),
        ({"schedule": "1f1b", "prefetch_forwards": 1}, {"family": "1f1b", "prefetch_forwards": 1}),
        ({"schedule": "1f1b", "prefetch_forwards": 0}, {"family": "1f1b"}),
        (
            {"schedule": "looped", "num_loops": 3, "microbatches_per_loop": 2, "prefetch_forwards": 0},
            {"family": "looped", "num_loops": 3, "microbatches_per_loop": 2},
        ),
        (
            {"microbatches_per_loop": 4, "num_loops": 2, "prefetch_forwards": 1},
            {"family": "looped", "num_loops": 2, "microbatches_per_loop": 4, "prefetch_forwards": 1},
        ),
        ({"schedule": "interleaved", "num_loops": 2}, {"family": "interleaved", "num_loops": 2}),
        ({"schedule": "wave", "num_loops": 3}, {"family": "wave", "num_loops": 3}),
        ({"schedule": "zb-h1"}, {"family": "zb-h1"}),
        ({"schedule": "zb-v", "backward": "split"}, {"family": "zb-v", "num_loops": 2}),
    ],
)
@pytest.mark.parametrize("effort", ["full", "quick"])
def test_every_named_order_is_obeyed(wishes, spec, effort):
    planned = sound_plan(chain(12), effort=effort, **wishes)
    numbers = {**spec, "family": ScheduleFamily(spec["family"])}
    assert planned.schedule.spec == ScheduleSpec(num_ranks=2, num_microbatches=4, **numbers)
    if planned.schedule.spec.family.splits_backward or wishes.get("backward") != "split":
        assert planned.schedule == build(planned.schedule.spec)


def test_a_named_order_with_backward_split_keeps_its_sequence():
    planned = sound_plan(chain(12), schedule="1f1b", prefetch_forwards=0, backward="split")
    rows = [" ".join(str(a) for a in actions if a.kind.value != "W") for actions in planned.schedule.per_rank]
    whole = build(ScheduleSpec(family=ScheduleFamily.ONE_F_ONE_B, num_ranks=2, num_microbatches=4))
    assert [row.replace("I", "B") for row in rows] == [" ".join(map(str, actions)) for actions in whole.per_rank]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_alone_is_obeyed(prefetch):
    planned = sound_plan(chain(16), ranks=4, prefetch_forwards=prefetch)
    assert planned.schedule.spec.prefetch_forwards == prefetch
    assert planned.schedule.spec.family is not ScheduleFamily.LIST


@pytest.mark.parametrize("loops", [1, 2, 3, 5])
def test_the_number_of_loops_alone_is_obeyed(loops):
    planned = sound_plan(chain(16), num_loops=loops)
    assert [planned.stage_ranks.count(rank) for rank in range(2)] == [loops, loops]


def test_the_block_alone_is_obeyed():
    assert sound_plan(chain(16), microbatches_per_loop=3).schedule.spec.microbatches_per_loop == 3


@pytest.mark.parametrize("cuts", [(7,), (1, 2, 8), (2, 3, 4, 5, 9)])
def test_given_cuts_decide_the_loops(cuts):
    for options in ({}, {"schedule": "looped"}, {"effort": "quick"}, {"backward": "split"}):
        assert sound_plan(chain(10), cuts=cuts, **options).cuts == cuts


def test_given_cuts_are_taken_where_the_search_would_not_look():
    graph = chain([node(0.0)] * 50 + [node(1.0)] * 50)
    assert sound_plan(graph, cuts=(17,)).cuts == (17,)


def test_a_smaller_share_of_the_memory_is_obeyed():
    graph = chain([node(saved=100)] * 8)
    roomy = make_plan(graph, machine(latency_s=5.0), 2, 8)
    half = max(roomy.peak_bytes) // 2 + 100
    tight = sound_plan(graph, machine(latency_s=5.0, memory_bytes=2 * half), microbatches=8, memory_fraction=0.5)
    assert max(tight.peak_bytes) <= half
    assert tight.estimate_s >= roomy.estimate_s


def test_quick_is_the_best_start():
    graph = random_graph(2)
    where = random_link(2)
    quick = make_plan(graph, where, 2, 4, SearchOptions(effort="quick"))
    assert quick.estimate_s == pytest.approx(best_start_s(graph, where, 2, 4))
    assert make_plan(graph, where, 2, 4).estimate_s < quick.estimate_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "lopped"}, "PF212"),
        ({"schedule": "gpipe", "prefetch_forwards": 1}, "PF210(.|\n)*nothing to prefetch"),
        ({"schedule": "1f1b", "num_loops": 2}, "PF210(.|\n)*one stage on each rank"),
        ({"schedule": "zb-h1", "num_loops": 2}, "PF210(.|\n)*one stage on each rank"),
        ({"schedule": "zb-v", "num_loops": 1}, "PF210(.|\n)*2 stages on each rank"),
        ({"schedule": "wave", "prefetch_forwards": 1}, "PF210(.|\n)*fixes how many forwards"),
        ({"schedule": "wave", "microbatches_per_loop": 2}, "PF210(.|\n)*only the looped schedule"),
        ({"microbatches_per_loop": 9}, "PF210(.|\n)*at most all of them"),
        ({"num_loops": 9}, "PF301 the model cannot be cut into 18 stages"),
        ({"cuts": (3, 5)}, "PF308 impossible cuts(.|\n)*3 stages are no multiple of 2 ranks"),
        ({"cuts": ()}, "PF308 impossible cuts(.|\n)*1 stages are no multiple of 2 ranks"),
        ({"cuts": (3, 5, 7), "num_loops": 1}, "PF308 impossible cuts(.|\n)*not num_loops=1"),
        ({"cuts": (5, 3, 7)}, "PF308 impossible cuts(.|\n)*each cut comes after the one before"),
        ({"cuts": (3, 3, 7)}, "PF308 impossible cuts"),
        ({"cuts": (8,)}, r"PF308 impossible cuts(.|\n)*no cut is legal at \[8\]"),
        ({"cuts": (0,)}, r"PF308 impossible cuts(.|\n)*no cut is legal at \[0\]"),
        ({"cuts": (6,)}, r"PF308 impossible cuts(.|\n)*no cut is legal at \[6\]"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(options, message):
    graph = chain([node(cut=index != 6) for index in range(8)])
    with pytest.raises(PfeifeError, match=message):
        make_plan(graph, machine(), 2, 4, SearchOptions(**options))


@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (-1, 4), (2, 0)])
def test_no_ranks_and_no_micro_batches_are_refused(ranks, microbatches):
    with pytest.raises(PfeifeError, match="PF210 impossible schedule: num_"):
        make_plan(chain(8), machine(), ranks, microbatches)


@pytest.mark.parametrize(
    ("name", "value"), [("backward", "halves"), ("recompute", "always"), ("effort", "none"), ("effort", "")]
)
def test_words_that_are_no_choice_are_refused(name, value):
    with pytest.raises(PfeifeError, match=f"PF307 {name}='{value}'(.|\n)*is one of"):
        SearchOptions(**{name: value})


@pytest.mark.parametrize(("number", "family", "stages"), [(3, "auto", 4), (7, "zb-v", 8)])
def test_more_stages_than_operations_are_refused(number, family, stages):
    with pytest.raises(PfeifeError) as error:
        make_plan(chain(number), machine(), 4, 4, SearchOptions(schedule=family))
    assert str(error.value).splitlines() == [
        f"PF301 the model cannot be cut into {stages} stages",
        f"  where  {number} operations, {number - 1} positions where a cut is legal",
        f"  why    {stages} stages need {stages - 1} cuts",
        f"  try    at most {number} stages: fewer processes or num_loops=1",
    ]


@pytest.mark.parametrize("options", [{"num_loops": 3}, {"cuts": tuple(range(1, 12))}])
def test_an_order_that_deadlocks_is_drawn_not_planned(options):
    wishes = SearchOptions(schedule="looped", microbatches_per_loop=4, prefetch_forwards=3, **options)
    with pytest.raises(PfeifeError, match=r"PF204 schedule deadlocks(.|\n)*<- here"):
        make_plan(chain(12), machine(), 4, 5, wishes)


def test_an_estimate_that_the_simulation_does_not_confirm_is_a_fault_of_the_package(monkeypatch):
    def longer(*arguments):
        timeline = simulate(*arguments)
        from dataclasses import replace

        return replace(timeline, intervals=tuple(replace(i, end_s=i.end_s + 1) for i in timeline.intervals))

    monkeypatch.setattr(search, "simulate", longer)
    with pytest.raises(InternalError, match=r"PF311 the plan takes(.|\n)*as executed(.|\n)*where(.|\n)*num_ranks=2"):
        make_plan(chain(8), machine(), 2, 4)
