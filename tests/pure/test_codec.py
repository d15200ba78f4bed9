"""A plan survives JSON exactly, and nothing else gets in."""

import json
from dataclasses import replace

import pytest

from pfeife_accelerate.errors import InternalError, PfeifeError
from pfeife_accelerate.ir import cost_graph_of, from_json, to_json
from pfeife_accelerate.ir.codec import encode
from pfeife_accelerate.planner import SearchOptions, make_plan, pipeline_plan


@pytest.fixture
def plan(chain, costs, machine):
    options = SearchOptions(schedule="looped", num_loops=2)
    ops = chain(9, skips=((0, 8),))
    planned = make_plan(cost_graph_of(ops, costs([0.1] * 9)), machine(bytes_per_s=3e3), 2, 4, options)
    return pipeline_plan(planned, ops)


def test_round_trip_is_exact(plan):
    assert from_json(to_json(plan)) == plan
    assert to_json(from_json(to_json(plan))) == to_json(plan)


def test_a_plan_written_before_values_were_copied_is_read(plan):
    data = json.loads(to_json(replace(plan, copied_values=("n0",))))
    assert data.pop("copied_values") == ["n0"]
    assert from_json(json.dumps(data)) == plan


def test_every_bit_of_a_float_survives(plan):
    odd = replace(plan, estimate_s=0.1 + 0.2)
    assert from_json(to_json(odd)).estimate_s == 0.1 + 0.2


def _edited(plan, edit):
    data = json.loads(to_json(plan))
    edit(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(version=1), "PF162 the plan has version 1"),
        (lambda d: d.pop("version"), "PF162 the plan has version None"),
        (lambda d: d.update(cutz=1), r"PF163 unknown key 'cutz' in plan(.|\n)*did you mean 'cuts'"),
        (lambda d: d["stages"][1].update(gpu=1), r"PF163 unknown key 'gpu' in plan\.stages\[1\]"),
        (lambda d: d["stages"][0].pop("params"), r"PF163 plan\.stages\[0\] has no 'params'"),
        (lambda d: d["spec"].update(family="lopped"), r"PF164 plan\.spec\.family is 'lopped'"),
        (lambda d: d["spec"].update(num_ranks="2"), r"PF164 plan\.spec\.num_ranks is '2'"),
        (lambda d: d.update(stage_ranks=[True, 1]), r"PF164 plan\.stage_ranks\[0\] is True"),
        (lambda d: d["stages"][0].update(op_range=[1]), r"PF164 plan\.stages\[0\]\.op_range(.|\n)*2 items"),
        (lambda d: d.update(cuts=3), r"PF164 plan\.cuts is 3(.|\n)*a list"),
        (lambda d: d.update(spec=[]), r"PF164 plan\.spec is \[\](.|\n)*an object"),
        (lambda d: d["per_rank"].pop(), r"PF167 the parts of the plan do not fit together: 2 peak_bytes for 1 ranks"),
        (lambda d: d["cuts"].pop(), r"PF167 (.|\n)*2 cuts for 4 stage_ranks"),
        (lambda d: d["stages"].pop(), r"PF167 (.|\n)*3 stages for 4 stage_ranks"),
        (lambda d: d.update(stage_ranks=[0, 1, 2, 0]), r"PF167 (.|\n)*stage_ranks \(0, 1, 2, 0\), 2 ranks"),
        (lambda d: d.update(recompute=[4]), r"PF167 (.|\n)*recompute \(4,\), 4 stages"),
        (lambda d: d["spec"].update(num_ranks=3), r"PF167 (.|\n)*orders of 2 ranks, and a spec for 3"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(plan, edit, message):
    with pytest.raises(PfeifeError, match=message):
        from_json(_edited(plan, edit))


def test_other_files_are_refused():
    with pytest.raises(PfeifeError, match="PF161 the plan is not JSON"):
        from_json("\x80pickle")
    with pytest.raises(PfeifeError, match="PF162"):
        from_json("[]")


def test_only_plain_data_is_written():
    with pytest.raises(InternalError, match="PF165 cannot write set"):
        encode({1})


def test_another_program_needs_four_keys(plan):
    data = json.loads(to_json(plan))
    assert data["cuts"] == list(plan.cuts)
    assert data["stage_ranks"] == [0, 1, 0, 1]
    assert data["per_rank"][0][:2] == ["0F0", "0F1"]
    assert data["recompute"] == []
    assert [str(action) for action in plan.schedule.per_rank[1]] == data["per_rank"][1]


def test_an_order_that_is_none_is_refused(plan):
    with pytest.raises(PfeifeError, match="PF211 '0G0' is not an action"):
        _ = replace(plan, per_rank=(("0G0",), ())).schedule
