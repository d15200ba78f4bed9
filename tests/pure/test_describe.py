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
