"""What follows from a plan."""

from pfeife_accelerate.ir import PipelinePlan, ScheduleFamily, ScheduleSpec, StageCost, StageSpec

PLAN = PipelinePlan(
    graph_fingerprint="f",
    cuts=(1, 2, 3),
    stage_ranks=(0, 1, 1, 0),
    per_rank=(("0F0", "3F0", "3B0", "0B0"), ("1F0", "2F0", "2B0", "1B0"), ()),
    estimate_s=0.1,
    peak_bytes=(10, 20, 0),
    spec=ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=3, num_microbatches=1),
    stages=(StageSpec(op_range=(0, 1), params=(), cost=StageCost(forward_s=0.1, backward_s=0.2)),) * 4,
    edges=(),
)


def test_the_loss_is_where_the_last_stage_is():
    assert (PLAN.num_ranks, PLAN.num_stages, PLAN.loss_rank) == (3, 4, 0)


def test_two_ranks_change_places():
    other = PLAN.with_swapped(0, 2)
    assert (other.stage_ranks, other.peak_bytes, other.loss_rank) == ((2, 1, 1, 2), (0, 20, 10), 2)
    assert other.per_rank == ((), *PLAN.per_rank[1:2], PLAN.per_rank[0])
    assert other.schedule.stages_of(2) == (0, 3)
    assert other.with_swapped(2, 0) == PLAN
    assert PLAN.with_swapped(1, 1) == PLAN
