"""The plan as a person reads it."""

from pfeife_accelerate.ir import (
    PipelinePlan,
    ScheduleFamily,
    ScheduleSpec,
    StageCost,
    StageSpec,
)
from pfeife_accelerate.planner.describe import describe


def test_a_plan_is_shown_as_a_table_an_order_and_an_estimate():
    cost = StageCost(forward_s=0.001, backward_s=0.002, param_bytes=4_000_000, saved_bytes=1_500_000)
    plan = PipelinePlan(
        graph_fingerprint="f",
        cuts=(3,),
        stage_ranks=(0, 1),
        per_rank=(("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1")),
        stages=(
            StageSpec(op_range=(0, 3), params=("a",), cost=cost),
            StageSpec(op_range=(3, 5), params=("b",), cost=cost),
        ),
        edges=(),
        spec=ScheduleSpec(family=ScheduleFamily.ONE_F_ONE_B, num_ranks=2, num_microbatches=2),
        estimate_s=0.0125,
        peak_bytes=(16_000_000, 18_000_000),
    )
    assert describe(plan).splitlines() == [
        "stage  rank  operations  parameters MB  forward ms  backward ms  kept MB",
        "    0     0           3           4.00        1.00         2.00     1.50",
        "    1     1           2           4.00        1.00         2.00     1.50",
        "1f1b, 2 micro-batches, 1 stage(s) a rank",
        "rank 0  0F0 0F1 0B0 0B1",
        "rank 1  1F0 1B0 1F1 1B1",
        "estimate: 12.5 ms a step, peak 16, 18 MB",
    ]


def test_the_bound_is_shown_where_it_is_known_and_ranks_may_have_different_numbers_of_stages():
    cost = StageCost(forward_s=0.001, backward_s=0.002)
    plan = PipelinePlan(
        graph_fingerprint="f",
        cuts=(3, 4),
        stage_ranks=(0, 1, 0),
        per_rank=(("0F0", "2F0", "2B0", "0B0"), ("1F0", "1B0")),
        stages=tuple(StageSpec(op_range=r, params=(), cost=cost) for r in ((0, 3), (3, 4), (4, 9))),
        edges=(),
        spec=ScheduleSpec(family=ScheduleFamily.LIST, num_ranks=2, num_microbatches=1),
        estimate_s=0.0125,
        lower_bound_s=0.009,
        peak_bytes=(1_000_000, 2_000_000),
    )
    *_, order, first, second, estimate = describe(plan).splitlines()
    assert order == "list, 1 micro-batches, 1-2 stage(s) a rank"
    assert (first, second) == ("rank 0  0F0 2F0 2B0 0B0", "rank 1  1F0 1B0")
    assert estimate == "estimate: 12.5 ms a step (no plan takes less than 9.0), peak 1, 2 MB"
