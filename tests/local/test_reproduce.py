"""The arithmetic of the paper's table: sharded data parallelism by hand, verdicts, what counts as near enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pfeife_accelerate.ir import CostGraph, CostNode, CostValue, LinkSpec, ParamUse
from pfeife_accelerate.tools import cli, reproduce, reproduce_costs, reproduce_rows
from pfeife_accelerate.tools.reproduce_costs import Graphs, file_name
from pfeife_accelerate.tools.reproduce_rows import Comparison, Gain, Line, deviation
from pfeife_accelerate.tools.reproduce_settings import SETTINGS, Setting, figures_of
from pfeife_accelerate.tools.reproduce_sharded import sharded
from pfeife_accelerate.zoo import FIGURES, GAINS

pytestmark = pytest.mark.local

LINK = LinkSpec(latency_s=0.0, bytes_per_s=1e9)
BUCKET = 500_000_000
LLAMA = tuple(figure for figure in FIGURES if figure.model == "llama2-7b")


def graph(*, element_bytes: int, elements: int) -> CostGraph:
    """Two operations, the second reads the first's parameter too."""
    use = ParamUse(owner=0, num_bytes=elements * element_bytes, state_bytes=16 * elements, optimizer_s=0.8)
    buffer = ParamUse(owner=1, num_bytes=1000, state_bytes=1000)
    first = CostNode(op="linear", forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, saved_bytes=70,
                     workspace_bytes=7, params=(use, buffer))  # fmt: skip
    second = CostNode(
        op="linear", forward_s=2.0, backward_input_s=4.0, saved_bytes=30, workspace_bytes=5, params=(use,)
    )
    value = CostValue(producer=0, readers=(1,), num_bytes=8, gradient_bytes=8)
    return CostGraph(name="two", nodes=(first, second), values=(value,))


def test_zero2_waits_for_its_last_bucket_and_for_the_parameters():
    step = sharded(graph(element_bytes=2, elements=10**9), LINK, stage=2, num_devices=4, element_bytes=2)
    assert step.compute_s == pytest.approx(9.0)
    assert step.optimizer_s == pytest.approx(0.2)
    # 2 GB round a ring of 4 take 1.5 s, a bucket of 1 GB 0.75 s: the backward's 6 s hide the others.
    assert step.waiting_s == pytest.approx(0.75 + 1.5)
    assert step.step_s == pytest.approx(9.0 + 0.2 + 2.25)
    # Whole parameters; a fourth of the gradients and of the 12 bytes that Adam keeps.
    assert step.state_bytes == pytest.approx(2e9 + 0.5e9 + 3e9)
    assert step.buffer_bytes == pytest.approx(9 * BUCKET * 2)
    assert step.peak_bytes == pytest.approx(5.5e9 + 9e9 + 100 + 7)


def test_zero2_shows_what_the_backward_cannot_hide():
    slow = LinkSpec(latency_s=0.0, bytes_per_s=1e8)
    step = sharded(graph(element_bytes=2, elements=10**9), slow, stage=2, num_devices=4, element_bytes=2)
    assert step.waiting_s == pytest.approx((15.0 - 6.0) + 15.0)


def test_zero3_shards_all_and_gathers_twice():
    step = sharded(graph(element_bytes=4, elements=10**9), LINK, stage=3, num_devices=4, element_bytes=4)
    # 4 GB take 3 s: as long as the forward; twice as much, gradients and parameters, as long as the backward.
    assert step.waiting_s == pytest.approx(0.0)
    assert step.state_bytes == pytest.approx(16e9 / 4)
    assert step.buffer_bytes == pytest.approx((4.5 * BUCKET + 1e9) * 4)
    half = LinkSpec(latency_s=0.0, bytes_per_s=5e8)
    slower = sharded(graph(element_bytes=4, elements=10**9), half, stage=3, num_devices=4, element_bytes=4)
    assert slower.waiting_s == pytest.approx(3.0 + 6.0)


def test_a_latency_counts_for_each_other_device():
    late = LinkSpec(latency_s=0.1, bytes_per_s=1e12)
    step = sharded(graph(element_bytes=2, elements=10**6), late, stage=2, num_devices=4, element_bytes=2)
    assert step.waiting_s == pytest.approx(0.6, abs=1e-4)


def line(paper: float | None, ours: float, peak: float = 1.0, **rest: bool) -> Line:
    return Line(system="x", how="", items_per_s=ours, peak_bytes=peak, limit_bytes=2.0, paper=paper, **rest)


@pytest.mark.parametrize(
    ("one", "meets"),
    [
        (line(10.0, 12.4), True),
        (line(10.0, 12.6), False),
        (line(10.0, 7.6), True),
        (line(10.0, 7.4), False),
        (line(10.0, 10.0, peak=3.0), False),  # the paper ran it
        (line(None, 10.0, peak=3.0), True),  # out of memory, there and here
        (line(None, 10.0), False),
        (line(None, 10.0, paper_has_it=False), True),
    ],
)
def test_a_line_meets_the_goal(one: Line, meets: bool):
    assert one.meets is meets


def test_ratios_and_gains_meet_the_goal():
    assert deviation(11.0, 10.0) == pytest.approx(0.1)
    assert Comparison(other="x", paper=1.2, ours=1.31).meets
    assert not Comparison(other="x", paper=1.2, ours=1.33).meets
    prefetch = next(gain for gain in GAINS if gain.part == "prefetch")
    assert Gain(paper=prefetch, ours=0.0).meets and not Gain(paper=prefetch, ours=0.18).meets


def test_every_figure_of_the_paper_has_one_setting():
    found = [figure for setting in SETTINGS for figure in figures_of(setting)]
    assert sorted(map(str, found)) == sorted(map(str, FIGURES))
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def test_the_command_reads_costs_and_writes_its_document(tmp_path, monkeypatch, capsys):
    tiny = Setting(
        name="llama2-7b-8x8", model="llama2-7b-tiny", num_devices=2, num_microbatches=2, rows=1, precision="fp32",
        num_loops=2, stated=(8, None), assumed=("a small model",),
    )  # fmt: skip
    monkeypatch.setattr(reproduce_rows, "figures_of", lambda setting: LLAMA)
    monkeypatch.setattr(reproduce, "SETTINGS", (tiny,))
    out, graphs = tmp_path / "table.md", tmp_path / "graphs"
    words = ["reproduce", "--rows", tiny.name, "--out", str(out), "--graphs", str(graphs)]
    assert cli.main(words) == 0
    kept = sorted(path.name for path in graphs.iterdir())
    assert file_name(tiny, 1) in kept
    text = out.read_text(encoding="utf-8")
    assert f"    pfeife reproduce --rows {tiny.name} --out {out}\n" in text
    assert re.search(r"\| llama2-7b-8x8 \| Pfeife \| 7.46 \| [0-9.e+]+ \| .* \| predicted \|", text)
    assert "| llama2-7b-8x8 | Colossal-AI pipeline, interleaved | - |" in text
    assert "a small model" in text and "Pfeife over" in capsys.readouterr().out
    monkeypatch.setattr(reproduce_costs, "resolve", None)  # what has been kept is not captured again
    assert Graphs(graphs).graph(tiny, 1).nodes


def test_an_unknown_row_is_refused(capsys):
    assert cli.main(["reproduce", "--rows", "vit-g14-4x5"]) == 2
    assert "PF160" in (error := capsys.readouterr().err) and "did you mean 'vit-g14-4x4'?" in error


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reproduction.md"


def test_the_document_has_its_command_and_every_figure():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "    pfeife reproduce --out docs/reproduction.md\n" in text
    for setting in SETTINGS:
        for figure in figures_of(setting):
            shown = "out of memory" if figure.items_per_s is None else f"{figure.items_per_s:.4g}"
            assert f"| {setting.name} | {figure.system.value} | {shown} |" in text
    for gain in GAINS:
        assert f"| {gain.model} | {gain.part} | {gain.share:.0%} |" in text


def test_the_document_explains_every_miss():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "not explained" not in text
    missed = text[text.index("## What is missed, and why") : text.index("## What was assumed")]
    items = text[text.index("## Items per second") : text.index("## Who wins, by how much")]
    ratios = text[text.index("## Who wins, by how much") : text.index("## What prefetch and looping save")]
    for part, over in ((items, ""), (ratios, "Pfeife over ")):
        for row, name in re.findall(r"^\| ([^|]+) \| ([^|]+) \|.*\*\*no\*\*", part, flags=re.MULTILINE):
            assert f"- {row}, {over}{name}: " in missed
