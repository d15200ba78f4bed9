"""Measurements kept on disk: read back exactly, merged, never in the way."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pfeife_accelerate.capture.graph import PlaceholderKind
from pfeife_accelerate.capture.measurable import measurable_ops
from pfeife_accelerate.capture.model_capture import ModelCapture
from pfeife_accelerate.cost import measure, op_profile
from pfeife_accelerate.cost.op_profile import OpProfile
from pfeife_accelerate.cost.store import Store, op_profiles
from pfeife_accelerate.ir import CostOrigin

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

CPU = torch.device("cpu")
PROFILE = OpProfile(
    forward_s=0.1 + 0.2,
    backward_input_s=1e-300,
    backward_weight_s=3.0,
    keeps_read=(True, False),
    keeps_written=(),
    kept_other_bytes=7,
    workspace_bytes=1 << 40,
    origin=CostOrigin.MEASURED,
)


def store(folder, **subject):
    return Store(folder, "operations", {"device": "a card (TM)", **subject}, OpProfile)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_what_is_added_is_read_back_exactly_and_merged(tmp_path):
    first, second = store(tmp_path), store(tmp_path)
    assert first.read() == {}
    first.add({"linear": PROFILE})
    second.add({"relu": replace(PROFILE, forward_s=1.0)})
    assert store(tmp_path).read() == {"linear": PROFILE, "relu": replace(PROFILE, forward_s=1.0)}
    first.add({"relu": PROFILE})
    assert store(tmp_path).read()["relu"] == PROFILE
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}


def test_another_device_or_version_has_entries_of_its_own(tmp_path):
    store(tmp_path, torch="1").add({"linear": PROFILE})
    assert store(tmp_path, torch="2").read() == {}
    assert op_profiles(tmp_path, CPU).path != store(tmp_path).path


def test_the_number_of_threads_is_another_device(tmp_path):
    threads = torch.get_num_threads()
    before = op_profiles(tmp_path, CPU).path
    try:
        torch.set_num_threads(threads + 1)
        assert op_profiles(tmp_path, CPU).path != before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 0}', '{"entries": {}}'])
def test_a_damaged_file_is_ignored_with_one_warning_and_written_anew(tmp_path, caplog, text):
    damaged = store(tmp_path)
    damaged.path.write_text(text)
    assert damaged.read() == store(tmp_path).read() == {}
    assert len(warnings_of(caplog)) == 1 and "cannot be read and is written anew" in caplog.text
    damaged.add({"linear": PROFILE})
    assert store(tmp_path).read() == {"linear": PROFILE}


def test_an_entry_of_a_wrong_type_makes_the_file_a_damaged_one(tmp_path, caplog):
    kept = store(tmp_path)
    kept.add({"linear": PROFILE})
    data = json.loads(kept.path.read_text())
    data["entries"]["linear"]["forward_s"] = "fast"
    kept.path.write_text(json.dumps(data))
    assert kept.read() == {}
    assert "linear.forward_s is 'fast'" in caplog.text


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        store(tmp_path / "file" / "folder").add({"linear": PROFILE})
    assert len(warnings_of(caplog)) == 1 and "cannot be kept for the next run" in caplog.text


def in_a_process(function):
    """The id of a forked process that runs a function: starting a new Python would take far longer."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_two_processes_that_write_at_once_lose_nothing(tmp_path):
    def write(name):
        for number in range(40):
            store(tmp_path).add({f"{name} {number}": PROFILE})

    running = {in_a_process(partial(write, name)) for name in "ab"}
    while running:
        store(tmp_path).read()  # never half a file: that would be a warning, and an empty result
        for child in tuple(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                assert status == 0
                running.discard(child)
    assert len(store(tmp_path).read()) == 80


# -- reuse -------------------------------------------------------------------------------------------------------------


def llama_ops(layers):
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
                         num_attention_heads=2, num_key_value_heads=2, use_cache=False)  # fmt: skip
    call = ModelCapture(LlamaForCausalLM(config), CPU).call((), {"input_ids": torch.randint(0, 64, (2, 8))}, None)
    assert any(p.kind is PlaceholderKind.STATE for p in call.graph.placeholders)
    return measurable_ops(call.graph, call.bindings, CPU)


def test_thirty_two_equal_layers_cost_one_layers_measuring_and_another_model_of_the_kind_nothing(tmp_path, monkeypatch):
    measured: list[str] = []
    original = op_profile._measured
    monkeypatch.setattr(op_profile, "_measured", lambda op, *rest: measured.append(op.key) or original(op, *rest))
    one, many = llama_ops(1), llama_ops(32)
    assert len(many) > 10 * len(one)

    profiles = op_profiles(tmp_path, CPU).read()
    measure(many, CPU, profiles=profiles)
    op_profiles(tmp_path, CPU).add(profiles)
    assert len(measured) == len(set(measured)) == len({op.key for op in one if op is not None})

    measured.clear()
    again = op_profiles(tmp_path, CPU).read()
    costs = measure(one, CPU, profiles=again, budget_s=0.0)  # nothing is new, so none of the budget is needed
    assert measured == []
    assert all(cost.origin is CostOrigin.MEASURED for cost in costs)
