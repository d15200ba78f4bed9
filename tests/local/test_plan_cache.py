"""Plans kept between runs: the same question finds the same plan, and nothing in the folder can break a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import PipelinePlan, ScheduleFamily, ScheduleSpec, StageCost, StageSpec, to_json
from pfeife_accelerate.session.plan_cache import PlanCache

pytestmark = pytest.mark.local

PLAN = PipelinePlan(
    graph_fingerprint="f",
    cuts=(),
    stage_ranks=(0,),
    per_rank=(("0F0", "0B0"),),
    estimate_s=0.1,
    peak_bytes=(1,),
    spec=ScheduleSpec(family=ScheduleFamily.GPIPE, num_ranks=1, num_microbatches=1),
    stages=(StageSpec(op_range=(0, 1), params=(), cost=StageCost(forward_s=0.1, backward_s=0.2)),),
    edges=(),
)


def _fine(_: PipelinePlan) -> None:
    pass


def test_what_was_written_is_read_for_the_same_question_only(tmp_path: Path):
    cache = PlanCache(tmp_path / "plans", {"graph": "f", "ranks": 2})
    assert cache.read(_fine) is None
    cache.write(PLAN)
    assert cache.read(_fine) == PLAN
    assert PlanCache(tmp_path / "plans", {"ranks": 2, "graph": "f"}).read(_fine) == PLAN
    assert PlanCache(tmp_path / "plans", {"graph": "f", "ranks": 4}).read(_fine) is None
    assert [path.name for path in (tmp_path / "plans").iterdir()] == [cache.path.name], "nothing is left beside it"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "PF161"),
        (b"\xff\xfe", "codec can't decode"),
        (to_json(PLAN)[:200].encode(), "PF161"),
        (to_json(PLAN).replace('"version": 2', '"version": 1').encode(), "PF162"),
        (to_json(PLAN).replace('"stage_ranks"', '"stages_rank"').encode(), "PF163"),
    ],
)
def test_a_damaged_or_old_file_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, said: str):
    cache = PlanCache(tmp_path, {"graph": "f"})
    cache.path.write_bytes(content)
    with caplog.at_level(logging.INFO, "pfeife_accelerate"):
        assert cache.read(_fine) is None
    assert f"the plan kept in {cache.path} is made anew" in caplog.text and said in caplog.text
    cache.write(PLAN)
    assert cache.read(_fine) == PLAN


def test_a_plan_that_does_not_suit_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def refuse(plan: PipelinePlan) -> None:
        raise PfeifeError(id="PF204", what=f"deadlock in {plan.graph_fingerprint}")

    cache = PlanCache(tmp_path, {"graph": "f"})
    cache.write(PLAN)
    with caplog.at_level(logging.INFO, "pfeife_accelerate"):
        assert cache.read(refuse) is None
    assert "deadlock in f" in caplog.text


def test_a_folder_that_cannot_be_used_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "plans", {"graph": "f"})
    with caplog.at_level(logging.INFO, "pfeife_accelerate"):
        cache.write(PLAN)
        assert cache.read(_fine) is None
    assert "the plan cannot be kept in" in caplog.text
