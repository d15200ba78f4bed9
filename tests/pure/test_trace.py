"""A recorded trace: its file, what it says beside the plan, and what viewers get."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from rich.console import Console

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import (
    Action,
    ActionKind,
    DeviceSpec,
    Edge,
    Interval,
    LinkSpec,
    Machine,
    PipelinePlan,
    ScheduleFamily,
    ScheduleSpec,
    StageCost,
    StageSpec,
    TensorSpec,
    Timeline,
    cost_graph_of,
    from_json,
    to_json,
)
from pfeife_accelerate.ir.trace import RecordedStep, Trace, trace_from_json, trace_to_json
from pfeife_accelerate.planner import SearchOptions, make_plan, pipeline_plan
from pfeife_accelerate.planner.comparison import compare, own_times, planned_timeline
from pfeife_accelerate.schedule import one_f_one_b
from pfeife_accelerate.tools.chrome_trace import chrome_trace
from pfeife_accelerate.tools.cli import main
from pfeife_accelerate.tools.trace import print_comparison, show

FLOATS = 250  # 1000 bytes: 1 ms on the link of `plan`, after 1 ms
DEVICE = DeviceSpec(name="d", memory_bytes=1, flops_per_s=(("float32", 1.0),), bytes_per_s=1.0, launch_s=0.0)

MACHINE = Machine(devices=(DEVICE,), link=LinkSpec(latency_s=1e-3, bytes_per_s=1e6))


def plan(number=3, machine=MACHINE):
    spec = ScheduleSpec(family=ScheduleFamily.ONE_F_ONE_B, num_ranks=2, num_microbatches=number)
    schedule = one_f_one_b(num_ranks=2, num_microbatches=number)
    cost = StageCost(forward_s=0.010, backward_s=0.020)
    return PipelinePlan(
        graph_fingerprint="x",
        cuts=(4,),
        stage_ranks=(0, 1),
        per_rank=tuple(tuple(str(a) for a in actions) for actions in schedule.per_rank),
        estimate_s=0.1,
        peak_bytes=(0, 0),
        spec=spec,
        stages=(StageSpec(op_range=(0, 4), params=(), cost=cost), StageSpec(op_range=(4, 8), params=(), cost=cost)),
        edges=(
            Edge(
                producer=0,
                consumers=(1,),
                value="v",
                spec=TensorSpec(shape=(FLOATS,), dtype="float32", requires_grad=True),
            ),
        ),
        machine=machine,
    )


def stretched(timeline, factor):
    """Everything takes `factor` as long."""
    intervals = (replace(i, start_s=i.start_s * factor, end_s=i.end_s * factor) for i in timeline.intervals)
    return Timeline(intervals=tuple(intervals))


def recorded(timeline, number=3):
    return RecordedStep.of(timeline, num_ranks=2, number=number, num_microbatches=3, clock_error_s=2e-5)


def trace(*factors):
    made = plan()
    steps = (recorded(stretched(planned_timeline(made), f), 3 + i) for i, f in enumerate(factors))
    return Trace(plan=made, steps=tuple(steps))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_trace_survives_its_file_and_gives_back_its_timelines():
    made = trace(1.0, 1.5)
    read = trace_from_json(trace_to_json(made), "trace.json")
    assert read == made
    assert read.steps[0].timeline == planned_timeline(made.plan)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "it has no plan with recorded steps"),
        ('{"version": 2, "cuts": []}', "it has no plan with recorded steps"),
        ('{"version": 7, "plan": {}, "steps": []}', "it has version 7, and this release reads version 1"),
        ('{"version": 1, "plan": {}, "steps": []}', "trace.plan has no 'graph_fingerprint'"),
    ],
)
def test_what_is_no_trace_is_told_so(text, why):
    with pytest.raises(PfeifeError, match=r"PF168 there\.json is not a recorded trace") as caught:
        trace_from_json(text, "there.json")
    assert why in str(caught.value) and "pfeife trace train.py" in str(caught.value)


def test_a_trace_of_nothing_or_of_unknown_actions_is_refused():
    made = trace(1.0)
    with pytest.raises(PfeifeError, match="PF168") as caught:
        trace_from_json(trace_to_json(replace(made, steps=())), "a")
    assert "no step was recorded" in str(caught.value)
    with pytest.raises(PfeifeError, match="PF168") as caught:
        trace_from_json(trace_to_json(made).replace('"0F0"', '"0Q0"', 2), "a")
    assert "'0Q0' is not an action" in str(caught.value)


def test_a_plan_keeps_its_machine_and_one_without_is_still_read():
    made = plan()
    assert from_json(to_json(made)) == made
    data = json.loads(to_json(made))
    del data["machine"]
    assert from_json(json.dumps(data)) == replace(made, machine=None)


# -- planned and recorded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "looped", "list"])
def test_a_plan_by_itself_gives_the_times_that_the_planner_had(chain, costs, machine, schedule):
    ops = chain(12, skips=((0, 11), (2, 7)), width=1000)
    there = machine(latency_s=0.1, bytes_per_s=4e4)
    planned = make_plan(cost_graph_of(ops, costs([1.0] * 12)), there, 3, 4, SearchOptions(schedule=schedule))
    assert planned_timeline(pipeline_plan(planned, ops, there)).intervals == planned.timeline.intervals


def test_without_a_machine_messages_are_free_and_without_edges_stages_are_a_chain():
    assert planned_timeline(plan(machine=None)).makespan_s == pytest.approx((3 + 1) * 0.030)
    assert planned_timeline(replace(plan(machine=None), edges=())).makespan_s == pytest.approx((3 + 1) * 0.030)
    assert planned_timeline(plan()).makespan_s > (3 + 1) * 0.030


def test_what_ran_as_planned_has_no_error():
    found = compare(trace(1.0))
    assert found.step.error == 0 and found.planned == found.recorded
    assert all(row.error == pytest.approx(0) for row in (*found.stages, *found.links))
    assert [(r.planned_idle, r.recorded_idle) for r in found.ranks] == [
        (pytest.approx(1 - 0.09 / found.planned.makespan_s),) * 2
    ] * 2


def test_times_of_several_steps_are_medians():
    found = compare(trace(2.0, 1.0, 1.2))
    assert found.step.error == pytest.approx(0.2) and found.number == 5
    assert [(row.stage, row.rank, row.kind.value) for row in found.stages] == [
        (0, 0, "F"), (0, 0, "B"), (1, 1, "F"), (1, 1, "B"),
    ]  # fmt: skip
    assert all(row.error == pytest.approx(0.2) for row in (*found.stages, *found.links))
    assert [(row.sender, row.receiver, row.num_messages) for row in found.links] == [(0, 1, 9), (1, 0, 9)]
    assert found.links[0].planned_s == pytest.approx(0.002)


def test_a_stage_that_is_slower_than_planned_stands_out():
    made = trace(1.0)
    slow = tuple(
        (text, start, end + 0.005 if text.startswith("1F") else end) for text, start, end in made.steps[0].per_rank[1]
    )
    step = replace(made.steps[0], per_rank=(made.steps[0].per_rank[0], slow))
    errors = {(row.stage, row.kind.value): row.error for row in compare(replace(made, steps=(step,))).stages}
    assert errors.pop((1, "F")) == pytest.approx(0.5)
    assert all(error == pytest.approx(0) for error in errors.values())


def test_a_transfer_that_waits_for_its_link_is_not_slow():
    def send(microbatch, start_s, end_s):
        action = Action(kind=ActionKind.SEND_F, stage=0, microbatch=microbatch, reader=1, peer=1)
        return Interval(action=action, rank=0, start_s=start_s, end_s=end_s)

    # Both are given to the transport at once; one after the other takes 2 on the link.
    timeline = Timeline(intervals=(send(0, 0.0, 2.0), send(1, 0.0, 4.0), send(2, 5.0, 7.0)))
    assert [(i.action.microbatch, start_s) for i, start_s in own_times(timeline)] == [(0, 0.0), (1, 2.0), (2, 5.0)]


def test_links_of_a_plan_without_a_machine_have_no_planned_time():
    made = replace(trace(1.0), plan=plan(machine=None))
    assert [(row.planned_s, row.error) for row in compare(made).links] == [(None, None)] * 2


# -- what people see ---------------------------------------------------------------------------------------------------


def printed(made):
    console = Console(width=60, no_color=True, force_terminal=False, record=True, file=None, quiet=False)
    with console.capture() as captured:
        print_comparison(console, made)
    return captured.get()


def test_the_picture_has_both_to_the_same_scale():
    text = printed(trace(1.25))
    lines = [line for line in text.splitlines() if line.startswith("rank 1")]
    assert "2 ranks, 1f1b; recorded training steps 3" in text
    planned, real = (line.index("│", 8) - line.index("│") - 1 for line in lines[:2])
    assert real == 60 - len("rank 0 ") - 2 and planned == pytest.approx(real / 1.25, abs=1)
    assert text.index("planned\n") < text.index("recorded, step 3")
    assert text.count("+25.0%") == 1 + 4 + 2
    assert "clocks of the ranks agree within 20 us" in text
    assert "links" not in text.lower().split("clocks of")[1]


def test_a_plan_without_a_machine_is_said_to_know_no_links():
    text = printed(replace(trace(1.0), plan=plan(machine=None)))
    assert "they are taken to cost nothing" in " ".join(text.split())


def test_the_commands_file_is_shown_and_written_for_viewers(tmp_path, capsys):
    file, out = tmp_path / "trace.json", tmp_path / "perfetto.json"
    file.write_text(trace_to_json(trace(1.0)))
    assert main(["trace", str(file), "--perfetto", str(out)]) == 0
    assert "Stages, one micro-batch" in capsys.readouterr().out
    first = out.read_text()
    assert json.loads(first) == chrome_trace(trace(1.0))
    out.unlink()
    assert main(["trace", "--perfetto", str(out), str(file)]) == 0
    assert out.read_text() == first


def test_files_that_cannot_be_used_are_told_so(tmp_path, capsys):
    assert main(["trace", str(tmp_path / "none.json")]) == 2
    assert "PF236 the trace" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text(to_json(plan()))
    assert main(["trace", str(tmp_path / "plan.json")]) == 2
    assert "plan.json is not a recorded trace" in capsys.readouterr().err
    (tmp_path / "trace.json").write_text(trace_to_json(trace(1.0)))
    with pytest.raises(PfeifeError, match=r"PF236 .* cannot be written"):
        show(tmp_path / "trace.json", perfetto=tmp_path / "none" / "out.json")


# -- what viewers see --------------------------------------------------------------------------------------------------


def test_every_rank_is_a_process_with_rows_for_compute_and_links():
    events = chrome_trace(trace(1.0, 1.1))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 0 as planned", 3: "rank 1 as planned"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(name for (pid, _), name in rows.items() if pid == 1) == ["compute", "receive from 0", "send to 0"]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used == rows.keys()


def test_every_action_is_a_slice_and_slices_of_a_row_do_not_overlap():
    made = trace(1.0, 1.1)
    events = chrome_trace(made)["traceEvents"]
    computed = [e["name"] for e in events if e["ph"] == "X" and e["pid"] < 2 and e["tid"] == 0]
    wanted = [str(i.action) for s in made.steps for i in s.timeline.intervals if i.action.kind.is_compute]
    assert sorted(computed) == sorted(wanted)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in rows.values():
        slices.sort()
        assert all(first[1] <= second[0] + 0.01 for first, second in pairwise(slices))
    shortest = min(e["dur"] for e in events if e["ph"] == "X" and e["tid"] == 0)
    assert shortest == pytest.approx(10_000), "in microseconds"


def test_arrows_lead_from_inside_a_send_to_inside_its_receive():
    events = chrome_trace(trace(1.0))["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 2 * 6 and starts.keys() == ends.keys()
    slices = [e for e in events if e["ph"] == "X"]
    for key, start in starts.items():
        end = ends[key]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"]) and end["bp"] == "e"
        assert {start["pid"] % 2, end["pid"] % 2} == {0, 1} and end["ts"] >= start["ts"]
        for event in (start, end):
            assert any(
                (s["pid"], s["tid"]) == (event["pid"], event["tid"]) and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
                for s in slices
            )


def test_waiting_for_a_link_is_told():
    made = trace(1.0)
    first, *others = (i for i in made.steps[0].timeline.intervals if i.action.kind is ActionKind.SEND_F)
    assert median(i.duration_s for i in others) == pytest.approx(0.002)
    waits = {
        e["name"]: e["args"]["waited for the link, ms"]
        for e in chrome_trace(made)["traceEvents"]
        if e["ph"] == "X" and e["cat"] == "transfer"
    }
    assert waits[str(first.action)] == 0
