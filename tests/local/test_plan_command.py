"""`pfeife plan`: what it prints, what it writes, how it fails. The search itself is tested with the planner."""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import (
    CostGraph,
    CostNode,
    CostValue,
    DeviceSpec,
    LinkSpec,
    Machine,
    ParamUse,
    from_json,
    to_json,
    write_cost_file,
)
from pfeife_accelerate.planner.bound import BoundKind, LowerBound
from pfeife_accelerate.planner.pipeline_plan import pipeline_plan
from pfeife_accelerate.tools.cli import main
from pfeife_accelerate.tools.plan import plan
from pfeife_accelerate.tools.plan_file import write_plan
from pfeife_accelerate.tools.plan_report import memory_table, print_plan, stage_table
from pfeife_accelerate.tools.plan_request import add_arguments
from tests.launching import run_command
from tests.simple_planner import simple_plan

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

PFEIFE = (sys.executable, "-m", "pfeife_accelerate.tools.cli")
GIB = 2**30


def chain(length=8):
    nodes = tuple(
        CostNode(
            op="linear", forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01, saved_bytes=GIB // 4,
            params=(ParamUse(owner=index, num_bytes=GIB // 8, state_bytes=GIB // 2),),
        )
        for index in range(length)
    )  # fmt: skip
    values = tuple(CostValue(producer=i, readers=(i + 1,), num_bytes=10) for i in range(length - 1))
    return CostGraph(name="chain", nodes=nodes, values=values)


MACHINE = Machine(
    devices=(DeviceSpec(name="box", memory_bytes=16 * GIB, flops_per_s=(), bytes_per_s=0.0, launch_s=0.0),),
    link=LinkSpec(latency_s=1e-5, bytes_per_s=1e10),
)


def searcher(request, machine):
    limit = int(machine.device_of(0).memory_bytes * request.memory_fraction)
    return lambda graph, ranks, microbatches, effort: simple_plan(graph, ranks, microbatches, limit_bytes=limit)


def run_plan(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return plan(parser.parse_args([str(word) for word in words]), searcher=searcher)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def graph_file(tmp_path):
    path = tmp_path / "chain.json.gz"
    write_cost_file(path, chain(), MACHINE)
    return path


# -- a cost graph ------------------------------------------------------------------------------------------------------


def test_a_graph_s_plan_is_printed(graph_file, capsys):
    assert run_plan("--graph", graph_file, "--ranks", 2, "--microbatches", 2) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "chain: 2 ranks of box, 2 micro-batches"
    for line in (
        "│     1 │    1 │        4-7 │    512 MiB │      40.00 │       80.00 │ 1.0 GiB │",
        "│    0 │    512 MiB │            1.5 GiB │     2.0 GiB │       0 B │      0 B │ 4.0 GiB │ 16.0 GiB │",
        "number of the micro-batch, then - forward, = backward, . idle",
        "order        1f1b, 2 micro-batches, 1 stage(s) a rank",
        "estimate     360.0 ms a step",
        "lower bound  240.0 ms (work)",
        "gap          50.0 %",
        "the best of the other families:",
        "  gpipe     720.0 ms  holds all micro-batches",
        "  zb-v             -  a stage would have no operation",
    ):
        assert line in lines, printed
    pictures = [line for line in lines if line.startswith("rank ")]
    assert [len(line) for line in pictures] == [100, 100]
    assert pictures[1].startswith("rank 1 │...")
    assert "also tried" not in printed and "pipeline_size" not in printed


def test_the_plan_file_says_all_to_another_program(graph_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    run_plan("--graph", graph_file, "--ranks", 2, "--microbatches", 2, "--out", out)
    data = json.loads(out.read_text())
    assert data["cuts"] == [4] and data["stage_ranks"] == [0, 1] and data["recompute"] == []
    assert data["per_rank"] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert data["estimate_s"] == pytest.approx(0.36) and data["lower_bound_s"] == pytest.approx(0.24)
    assert data["peak_bytes"] == [4 * GIB, 3 * GIB]
    assert from_json(out.read_text()).cuts == (4,)
    assert f"written to {out}" in capsys.readouterr().out


def test_memory_is_as_given(graph_file, capsys):
    run_plan("--graph", graph_file, "--ranks", 2, "--microbatches", 2, "--memory", "8GiB", "--memory-fraction", "0.5")
    assert "4.0 GiB │" in capsys.readouterr().out
    with pytest.raises(PfeifeError, match="PF302"):
        run_plan("--graph", graph_file, "--ranks", 2, "--microbatches", 2, "--memory", "2GiB")


def test_a_file_that_does_not_name_its_device(tmp_path, capsys):
    path = tmp_path / "chain.json"
    write_cost_file(path, chain(), MACHINE)
    path.write_text(path.read_text().replace('"device": "box", ', ""))
    run_plan("--graph", path, "--ranks", 2, "--microbatches", 2)
    assert capsys.readouterr().out.startswith("chain: 2 ranks, 2 micro-batches\n")


def test_recomputed_stages_are_marked_and_unknown_bounds_have_no_gap(capsys):
    from rich.console import Console

    found = replace(
        simple_plan(chain(), 2, 2),
        recompute=(1,),
        lower_bound=LowerBound(seconds=0.0, kind=BoundKind.WORK),
        runners_up=(),
    )
    console = Console(width=120)
    print_plan(console, found, chain(), all_reduce_s=0.002)
    printed = capsys.readouterr().out
    assert "1.0 GiB (recomputed)" in printed and "gap" not in printed and "families" not in printed
    assert "all-reduce   2.00 ms more" in printed
    assert stage_table(found, chain()).row_count == memory_table(found).row_count == 2


# -- a model -----------------------------------------------------------------------------------------------------------


TINY = ("transformers:gpt2", "--seq", 16, *(word for entry in (
    "n_layer=2", "n_embd=32", "n_head=2", "vocab_size=64", "n_positions=32") for word in ("--set", entry)))  # fmt: skip


def test_a_model_s_plan_with_names_and_open_numbers(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = (*TINY, "--machine", "a100-40gb", "--ranks", 2, "--batch", 8, "--dtype", "bf16", "--out", out)
    assert run_plan(*words, "--replicas", "auto") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpt2, 0.0 M parameters in bf16: 2 ranks of A100-40GB, "), printed
    assert "also tried, compared by quick plans (that of the best took " in printed
    assert "options      pipeline_size: " in printed
    made = from_json(out.read_text())
    assert made.graph_fingerprint and "transformer.wte.weight" in made.stages[0].params


def test_a_pipeline_s_plan_names_what_it_sends(tmp_path):
    out = tmp_path / "plan.json"
    run_plan(*TINY, "--machine", "cpu", "--ranks", 2, "--batch", 8, "--microbatches", 4, "--out", out)
    made = from_json(out.read_text())
    assert made.num_ranks == 2 and made.spec.num_microbatches == 4 and made.edges
    assert {edge.producer < made.cuts[0] for edge in made.edges} == {True}


def test_only_some_of_many_attempts_are_shown(capsys):
    run_plan(*TINY, "--machine", "cpu", "--ranks", 8, "--batch", 64, "--replicas", "auto", "--memory", "1GB")
    lines = capsys.readouterr().out.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("also tried")]
    assert len(lines[start + 1 :]) == 10 and lines[-2].endswith("more, slower or too large")


def test_what_does_not_fit_says_so_among_the_attempts(capsys, monkeypatch):
    def picky(request, machine):
        def search(graph, ranks, microbatches, effort):
            if microbatches == 2:
                raise PfeifeError(id="PF302", what="no plan fits into memory")
            return simple_plan(graph, ranks, microbatches)

        return search

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [str(word) for word in (*TINY, "--machine", "cpu", "--ranks", 2, "--batch", 4)]
    plan(parser.parse_args(words), searcher=picky)
    assert "  2 micro-batches of 2 rows: no plan fits into memory\n" in capsys.readouterr().out


def test_batch_norm_refuses_micro_batches_of_one_row():
    words = ("test_resnet", "--resolution", 32, "--machine", "cpu", "--ranks", 2, "--batch", 8, "--microbatches", 8)
    with pytest.raises(
        PfeifeError, match=r"PF144 micro-batches of 1 row\(s\) are too small for test_resnet"
    ) as failure:
        run_plan(*words)
    assert failure.value.hints == ("--microbatches 4 or fewer",)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_be_written(tmp_path):
    found = pipeline_plan(simple_plan(chain(), 2, 2))
    with pytest.raises(PfeifeError, match="PF143 the plan cannot be written to"):
        write_plan(tmp_path / "no" / "plan.json", found)


def test_a_plan_replaces_another_at_once(tmp_path, monkeypatch):
    found, path = pipeline_plan(simple_plan(chain(), 2, 2)), tmp_path / "plan.json"
    path.write_text("another")

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched, pytest.raises(PfeifeError, match="PF143"):
        patched.setattr("os.replace", fail)
        write_plan(path, found)
    assert path.read_text() == "another"
    write_plan(path, found)
    assert path.read_text() == to_json(found)
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_can_go_into_a_pipe(tmp_path):
    found, path = pipeline_plan(simple_plan(chain(), 2, 2)), tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(path.read_text)
        write_plan(path, found)
        assert text.result(timeout=60) == to_json(found)


@pytest.mark.parametrize(("name", "why"), [("no/plan.json", "there is no folder"), (".", "it is a folder")])
def test_where_a_plan_cannot_be_written_it_is_not_sought(graph_file, tmp_path, name, why, capsys):
    words = ["--graph", str(graph_file), "--ranks", "2", "--microbatches", "4", "--out", str(tmp_path / name)]
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("PF143") and why in captured.err and "try" in captured.err
    assert "Stages" not in captured.out


@pytest.mark.parametrize("option", ["--memory", "--out", "--graph"])
def test_an_empty_word_is_refused(graph_file, option, capsys):
    words = {"--graph": str(graph_file), "--ranks": "2", "--microbatches": "4"} | {option: ""}
    assert main(["plan", *(word for pair in words.items() for word in pair)]) == 2
    assert "try" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--graph", "nowhere.json", "--ranks", "2", "--microbatches", "4"), "PF166 nowhere.json is not a cost graph"),
        (("vit-g14", "--machine", "a1000", "--ranks", "2", "--batch", "4"), "PF232 no machine 'a1000'"),
        (("--ranks", "2"), "PF140 pfeife plan takes either MODEL or --graph FILE"),
    ],
)
def test_failures_are_printed_without_a_traceback(words, text, capsys):
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(text) and "try" in captured.err and "Traceback" not in captured.err


def test_the_command_as_a_process():
    result = run_command(
        [*PFEIFE, "plan", "--graph", "nowhere.json", "--ranks", "2", "--microbatches", "4"], timeout=60
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.report()
    assert result.stderr.startswith("PF166 nowhere.json is not a cost graph\n  why    FileNotFoundError")


def test_help_does_not_wait_for_torch():
    code = "import sys; from pfeife_accelerate.tools import plan_request, cli; assert 'rich' not in sys.modules"
    assert run_command([sys.executable, "-c", code], timeout=60).returncode == 0
    result = run_command([*PFEIFE, "plan", "--help"], timeout=60).check()
    assert "--microbatches M" in result.stdout and "--machine NAME" in result.stdout
