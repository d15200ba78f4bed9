"""docs/planner.md shows what the code does: its pictures, its cost file, its options."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pfeife_accelerate.ir import PipelinePlan, ScheduleFamily, ScheduleSpec, StageCost, read_cost_file
from pfeife_accelerate.schedule import build
from pfeife_accelerate.schedule.picture import draw
from pfeife_accelerate.tools.plan_request import add_arguments
from tests.simple_planner import timeline_of

TEXT = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"<!-- picture (\S+) (.*?) -->\n```\n(.*?)\n```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("family", "numbers", "picture"), PICTURES, ids=[f"{f} {n}" for f, n, _ in PICTURES])
def test_pictures_of_orders_are_true(family, numbers, picture):
    given = {key: int(value) for key, value in (pair.split("=") for pair in numbers.split())}
    spec = ScheduleSpec(family=ScheduleFamily(family), num_ranks=3, num_microbatches=6, **given)
    share = 1 / spec.num_loops
    stages = (StageCost(forward_s=share, backward_s=2 * share),) * spec.num_stages
    timeline = timeline_of(build(spec), stages)
    assert draw(timeline, num_ranks=3, width=9 + round(4 * timeline.makespan_s)) == picture


def test_there_are_pictures():
    assert len(PICTURES) >= 4


def test_the_smallest_cost_file_is_one(tmp_path):
    (example,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "costs.json"
    path.write_text(example)
    graph, machine = read_cost_file(path)
    assert len(graph.nodes) == 2 and machine.device_of(0).memory_bytes == json.loads(example)["device_memory_bytes"]
    # Half of a backward each, as the table says.
    assert graph.nodes[0].backward_input_s == graph.nodes[0].backward_weight_s == pytest.approx(1e-3)


def test_every_key_of_a_plan_is_explained():
    section = TEXT.split("## plan.json")[1].split("\n## ")[0]
    explained = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert explained == {field.name for field in fields(PipelinePlan)}


def test_every_option_is_explained():
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    section = TEXT.split("## Two ways to ask")[1].split("\n## ")[0]
    assert {flag for flag in flags if f"`{flag}" not in section} <= {"--graph"}


def test_every_family_is_explained():
    section = TEXT.split("## The families of orders")[1].split("\n## ")[0]
    assert {family.value for family in ScheduleFamily} <= set(re.findall(r"^\*\*`(\S+)`\*\*", section, re.MULTILINE))
