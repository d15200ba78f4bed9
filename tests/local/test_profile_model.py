"""`pfeife profile MODEL`: measured costs of a model by its name, without a script."""

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import read_cost_file
from pfeife_accelerate.tools.cli import main

pytestmark = pytest.mark.local


def test_a_model_by_name_is_measured_and_can_be_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "costs.json.gz"
    assert main(["profile", "--rows", "2", "--seconds", "20", "--out", str(out), "timm:test_vit"]) == 0
    printed = capsys.readouterr().out
    graph, machine = read_cost_file(out)
    assert f"written: {out}" in printed and "linear" in printed
    assert graph.work_s > 0 and machine.device_of(0).memory_bytes > 0 and not machine.device_of(0).runs_ahead
    assert any(node.forward_s != other.forward_s for node in graph.nodes for other in graph.nodes[:1])
    assert any((tmp_path / "cache").rglob("*.json")), "what has been measured is kept"
    assert main(["plan", "--graph", str(out), "--ranks", "2", "--microbatches", "4", "--effort", "quick"]) == 0
    assert "estimate" in capsys.readouterr().out


def test_a_folder_that_is_not_there_and_a_model_that_nobody_knows_are_refused(tmp_path, capsys):
    assert main(["profile", "--out", str(tmp_path / "no" / "costs.json"), "timm:test_vit"]) == 2
    assert f"PF234 the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err
    assert main(["profile", "--out", str(tmp_path / "costs.json"), "timm:test_vitt"]) == 2
    assert "test_vit" in capsys.readouterr().err
    with pytest.raises(PfeifeError, match="PF234"):
        from pfeife_accelerate.tools.profile import profile_model

        profile_model("timm:test_vit", rows=1, out=tmp_path / "no" / "costs.json")
