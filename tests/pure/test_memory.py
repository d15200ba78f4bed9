"""Activations alive in the actual order."""

from dataclasses import replace

import pytest

from pfeife_accelerate.ir import ActionKind
from pfeife_accelerate.planner import peak_memory
from pfeife_accelerate.schedule import backward_only, forward_only, gpipe, looped, one_f_one_b


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 2)])
def test_1f1b_holds_as_many_micro_batches_as_ranks_follow(even_stages, ranks, microbatches):
    stages = even_stages(ranks, saved_bytes=10)
    memory = peak_memory(one_f_one_b(num_ranks=ranks, num_microbatches=microbatches), stages)
    assert memory.peak_bytes == tuple(10 * min(ranks - rank, microbatches) for rank in range(ranks))


def test_prefetch_holds_more(even_stages):
    schedule = one_f_one_b(num_ranks=4, num_microbatches=8, prefetch_forwards=1)
    assert peak_memory(schedule, even_stages(4, saved_bytes=10)).peak_bytes == (50, 40, 30, 10)


def test_gpipe_holds_all(even_stages):
    schedule = gpipe(num_ranks=2, num_microbatches=5, num_loops=2)
    assert peak_memory(schedule, even_stages(4, saved_bytes=10)).peak_bytes == (100, 100)


def test_parameters_with_their_state_and_workspace_come_on_top(even_stages):
    stages = even_stages(4, saved_bytes=10, param_bytes=100, workspace_bytes=3)
    memory = peak_memory(looped(num_ranks=2, num_microbatches=2, num_loops=2), stages, state_multiplier=3.0)
    assert memory.static_bytes == (600, 600)
    assert memory.peak_bytes == (600 + 40 + 3, 600 + 30 + 3)


def test_evaluation_keeps_nothing(even_stages):
    schedule = forward_only(gpipe(num_ranks=2, num_microbatches=5))
    assert peak_memory(schedule, even_stages(2, saved_bytes=10)).peak_bytes == (10, 10)


def test_backwards_alone_start_with_everything(even_stages):
    schedule = backward_only(gpipe(num_ranks=2, num_microbatches=5))
    assert peak_memory(schedule, even_stages(2, saved_bytes=10)).peak_bytes == (50, 50)


def test_a_weight_gradient_put_off_keeps_its_activations(even_stages):
    schedule = gpipe(num_ranks=1, num_microbatches=2)
    f0, f1, b0, b1 = schedule.per_rank[0]
    i0, i1 = (replace(b, kind=ActionKind.INPUT_GRADIENT) for b in (b0, b1))
    w0, w1 = (replace(b, kind=ActionKind.WEIGHT_GRADIENT) for b in (b0, b1))
    stages = even_stages(1, saved_bytes=10)
    late = replace(schedule, per_rank=((f0, i0, f1, i1, w0, w1),))
    early = replace(schedule, per_rank=((f0, i0, w0, f1, i1, w1),))
    assert peak_memory(late, stages).peak_bytes == (20,)
    assert peak_memory(early, stages).peak_bytes == (10,)
