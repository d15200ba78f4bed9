"""Options: three sources, one precedence, and refusals that say what was meant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pfeife_accelerate.config import PfeifePlugin, cache_folder, export, is_enabled, overlay
from pfeife_accelerate.errors import PfeifeError

pytestmark = pytest.mark.pure

FULL = PfeifePlugin(
    pipeline_size=2,
    num_microbatches=8,
    schedule="looped",
    num_loops=3,
    microbatches_per_loop=4,
    prefetch_forwards=0,
    split_points=("model.layers.4", "model.layers.8"),
    plan_file="plans/a plan.json",
    profile_file="costs.json.gz",
    cache_dir="measured/here",
    on_capture_failure="error",
    on_loss_mismatch="error",
    batch_dims=(("src", 1), ("conditions.mask", None), ("0", 0)),
    plan_cache=False,
    verbose=2,
)


@pytest.mark.parametrize("plugin", [PfeifePlugin(), FULL, PfeifePlugin(verbose=1), PfeifePlugin(split_points=("a",))])
def test_environment_round_trip_is_exact(plugin):
    assert PfeifePlugin.from_environment(plugin.to_environment()) == plugin


def test_an_empty_section_takes_all_defaults():
    assert PfeifePlugin.from_mapping({}) == PfeifePlugin.from_mapping(None) == PfeifePlugin()


def test_auto_and_null_mean_the_default():
    section = {"pipeline_size": "auto", "num_microbatches": "auto", "schedule": "auto", "plan_file": None}
    assert PfeifePlugin.from_mapping(section) == PfeifePlugin()
    assert PfeifePlugin.from_environment({"PFEIFE_NUM_MICROBATCHES": "auto"}) == PfeifePlugin()


def test_split_points_may_be_a_list_or_one_name():
    assert PfeifePlugin.from_mapping({"split_points": ["a.0", "a.1"]}).split_points == ("a.0", "a.1")
    assert PfeifePlugin.from_mapping({"split_points": "a.0"}).split_points == ("a.0",)


def test_batch_dims_may_be_a_mapping_and_none_says_no_batch():
    wanted = (("src", 1), ("mask", None), ("0", 0))
    assert PfeifePlugin(batch_dims={"src": 1, "mask": None, "0": 0}).batch_dims == wanted
    assert PfeifePlugin.from_mapping({"batch_dims": {"src": 1, "mask": "none", 0: 0}}).batch_dims == wanted
    environment = {"PFEIFE_BATCH_DIMS": "src=1, mask=none,0=0"}
    assert PfeifePlugin.from_environment(environment).batch_dims == wanted


def test_unknown_key_is_refused_with_the_likely_one():
    with pytest.raises(
        PfeifeError, match=r"PF101 unknown key 'num_micro_batches'(.|\n)*did you mean 'num_microbatches'"
    ):
        PfeifePlugin.from_mapping({"num_micro_batches": 4})


def test_unknown_variable_is_refused_with_the_likely_one():
    with pytest.raises(PfeifeError, match=r"PF101 unknown variable 'PFEIFE_PIPELIN_SIZE'(.|\n)*'PFEIFE_PIPELINE_SIZE'"):
        PfeifePlugin.from_environment({"PFEIFE_PIPELIN_SIZE": "2"})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("pipeline_size", 0, r'pipeline_size must be a whole number >= 1 or "auto", got 0'),
        ("num_microbatches", 2.5, "num_microbatches must be a whole number"),
        ("num_microbatches", True, "num_microbatches must be a whole number"),
        ("prefetch_forwards", -1, "prefetch_forwards must be a whole number >= 0"),
        ("schedule", "1f1", r"schedule must be one of (.|\n)*did you mean '1f1b'"),
        ("schedule", 7, "schedule must be one of"),
        ("backward", "halves", "backward must be one of"),
        ("recompute", "always", "recompute must be one of"),
        ("split_points", [1], "split_points must be a list of module names"),
        ("split_points", ["a,b"], "split_points must be a list of module names"),
        ("plan_file", 3, "plan_file must be a path"),
        ("on_capture_failure", "fallbck", r"on_capture_failure must be one of (.|\n)*did you mean 'fallback'"),
        ("batch_dims", {"x": -1}, "batch_dims must be a mapping of argument names to dimensions"),
        ("batch_dims", ["x"], "batch_dims must be a mapping of argument names to dimensions"),
        ("verbose", 3, "verbose must be a whole number from 0 to 2"),
        ("verbose", True, "verbose must be a whole number from 0 to 2"),
    ],
)
def test_wrong_values_are_refused_in_yaml(key, value, text):
    with pytest.raises(PfeifeError, match=f"PF102 {text}"):
        PfeifePlugin.from_mapping({key: value})


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("PFEIFE_PIPELINE_SIZE", "two", r"PFEIFE_PIPELINE_SIZE must be a whole number >= 1 or \"auto\", got 'two'"),
        ("PFEIFE_PIPELINE_SIZE", "0", "pipeline_size must be a whole number"),
        ("PFEIFE_BATCH_DIMS", "x=first", "batch_dims must be a mapping"),
        ("PFEIFE_ENABLED", "maybe", "PFEIFE_ENABLED must be true or false, got 'maybe'"),
    ],
)
def test_wrong_values_are_refused_in_the_environment(variable, value, text):
    with pytest.raises(PfeifeError, match=text):
        PfeifePlugin.from_environment({variable: value})


def test_wrong_values_are_refused_as_keywords():
    with pytest.raises(PfeifeError, match=r"PF102 pipeline_size must be(.|\n)*PfeifePlugin\(\.\.\.\)"):
        PfeifePlugin(pipeline_size="2")


def test_a_section_that_is_no_mapping_is_refused():
    with pytest.raises(PfeifeError, match="PF102 pfeife_config must be a mapping of options, got 3"):
        PfeifePlugin.from_mapping(3)


def test_keyword_over_environment_over_yaml():
    yaml = PfeifePlugin(pipeline_size=2, num_microbatches=2, verbose=1)
    environment = PfeifePlugin(num_microbatches=4, schedule="gpipe")
    keyword = PfeifePlugin(schedule="1f1b")
    merged = overlay(keyword, overlay(environment, yaml))
    assert merged == PfeifePlugin(pipeline_size=2, num_microbatches=4, schedule="1f1b", verbose=1)


def test_enabled_by_any_variable_unless_switched_off():
    assert not is_enabled({})
    assert is_enabled({"PFEIFE_VERBOSE": "1"})
    assert is_enabled({"PFEIFE_ENABLED": "true"})
    assert not is_enabled({"PFEIFE_ENABLED": "false", "PFEIFE_VERBOSE": "1"})


def test_export_replaces_what_was_there(monkeypatch):
    # Set first what export will set, so that monkeypatch takes it away afterwards.
    for variable, value in (("PFEIFE_VERBOSE", "2"), ("PFEIFE_PIPELINE_SIZE", "1"), ("PFEIFE_ENABLED", "false")):
        monkeypatch.setenv(variable, value)
    export(PfeifePlugin(pipeline_size=3))
    assert PfeifePlugin.from_environment() == PfeifePlugin(pipeline_size=3)
    assert is_enabled()


def test_measurements_are_kept_where_the_option_or_the_users_cache_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(PfeifePlugin()) == tmp_path / "xdg" / "pfeife_accelerate"
    assert cache_folder(PfeifePlugin(cache_dir="~/mine")) == tmp_path / "mine"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder(PfeifePlugin()) == tmp_path / ".cache" / "pfeife_accelerate"


def test_package_and_options_need_no_torch():
    script = (
        "import sys; sys.modules['torch'] = None\nimport pfeife_accelerate as p; print(p.PfeifePlugin(), p.PfeifeError)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_a_flag_is_true_or_false():
    assert PfeifePlugin.from_environment({"PFEIFE_PLAN_CACHE": "no"}).plan_cache is False
    assert PfeifePlugin.from_mapping({"plan_cache": False}).plan_cache is False
    with pytest.raises(PfeifeError, match="PF102 PFEIFE_PLAN_CACHE must be true or false, got 'perhaps'"):
        PfeifePlugin.from_environment({"PFEIFE_PLAN_CACHE": "perhaps"})
    with pytest.raises(PfeifeError, match="PF102 plan_cache must be true or false, got 'no'"):
        PfeifePlugin.from_mapping({"plan_cache": "no"})
