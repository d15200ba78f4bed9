"""`accelerate launch` with our section: every way to start, every import order, every refusal."""

from __future__ import annotations

import json
import sys

import pytest

from pfeife_accelerate.integration.launch import with_large_pages
from tests.launching import free_port, run_command, run_ranks, run_script

pytestmark = pytest.mark.local

FACTS = """
import json, os, sys
accelerator = accelerate.Accelerator()
ours = [accelerator.num_processes, accelerator.process_index, accelerator.is_main_process]
theirs = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")]
sys.stdout.write(json.dumps(ours + theirs) + chr(10))
sys.stdout.flush()
"""
SCRIPT = "import accelerate\n" + FACTS
# What the launcher gives to a process, which is told without seconds of imports.
GIVEN = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PFEIFE_PIPELINE_SIZE")
sys.stdout.write(json.dumps([os.environ.get(name) for name in names]) + chr(10))
"""
ONE_PIPELINE = [[1, 0, True, "0", "2"], [1, 0, False, "1", "2"]]
SECTION = {"pfeife_config": {"pipeline_size": 2}}


def facts_of(result):
    rows = [json.loads(line) for line in result.check().stdout.splitlines() if line.startswith("[")]
    return [row[:5] for row in sorted(rows, key=lambda row: row[3])]


def given_of(result):
    return sorted(json.loads(line) for line in result.check().lines("["))


def test_a_script_is_started_as_one_pipeline():
    result = run_script(SCRIPT, num_processes=2, config=SECTION)
    assert facts_of(result) == ONE_PIPELINE
    assert result.stderr == ""


@pytest.mark.parametrize("option", ["--config", "--config_file", "--config-file"])
def test_config_and_config_file_are_the_same(option):
    result = run_script(GIVEN, num_processes=2, config=SECTION, config_option=option, env={"OMP_NUM_THREADS": "1"})
    assert given_of(result) == [["0", "2", "1", "2"], ["1", "2", "1", "2"]]
    assert result.stderr == ""


@pytest.mark.parametrize(("module", "words"), [("accelerate_cli", ["launch"]), ("launch", [])])
def test_the_installed_commands(module, words, tmp_path):
    script, config = tmp_path / "train.py", tmp_path / "pfeife.yaml"
    script.write_text(GIVEN)
    config.write_text(
        f"distributed_type: MULTI_CPU\nnum_processes: 2\nmain_process_port: {free_port()}\n"
        "pfeife_config: {pipeline_size: 2}\n"
    )
    start = f"from accelerate.commands.{module} import main; main()"
    result = run_command([sys.executable, "-c", start, *words, "--config", str(config), str(script)])
    assert given_of(result) == [["0", "2", "1", "2"], ["1", "2", "1", "2"]]


def test_a_config_option_of_the_script_is_the_scripts():
    script = "import sys; sys.stdout.write(repr(sys.argv[1:]) + chr(10))"
    result = run_script(script, num_processes=1, config=SECTION | {"num_processes": 2}, args=["--config", "x.yaml"])
    assert result.check().lines() == ["['--config', 'x.yaml']"] * 2


@pytest.mark.parametrize(
    ("distributed_type", "use_cpu"), [("MULTI_CPU", True), ("MULTI_CPU", False), ("MULTI_GPU", True), ("NO", True)]
)
def test_local_processes_really_start(distributed_type, use_cpu):
    config = {"distributed_type": distributed_type, "use_cpu": use_cpu, **SECTION}
    assert facts_of(run_script(SCRIPT, num_processes=2, config=config)) == ONE_PIPELINE


def test_command_line_has_priority_over_the_yaml():
    config = {"pfeife_config": {}}
    result = run_script(GIVEN, num_processes=2, config=config, launch_args=["--num_processes", "3"])
    assert [row[:2] for row in given_of(result)] == [[str(rank), "3"] for rank in range(3)]


def test_environment_has_priority_over_the_yaml():
    result = run_script(GIVEN, num_processes=2, config=SECTION, env={"PFEIFE_PIPELINE_SIZE": "1"})
    assert [row[3] for row in given_of(result)] == ["1", "1"]


def test_threads_are_shared_between_the_processes_unless_said_otherwise():
    result = run_script(GIVEN, num_processes=2, config=SECTION, env={"OMP_NUM_THREADS": None})
    threads = {row[2] for row in given_of(result)}
    assert len(threads) == 1
    assert int(threads.pop()) >= 1
    result = run_script(GIVEN, num_processes=2, config=SECTION, env={"OMP_NUM_THREADS": "3"})
    assert {row[2] for row in given_of(result)} == {"3"}
    arguments = ["--num_cpu_threads_per_process", "5"]
    result = run_script(GIVEN, num_processes=2, config=SECTION, launch_args=arguments, env={"OMP_NUM_THREADS": None})
    assert {row[2] for row in given_of(result)} == {"5"}


def test_cpu_ranks_get_large_pages_unless_said_otherwise():
    script = 'import os, sys; sys.stdout.write("tunables " + os.environ["GLIBC_TUNABLES"] + chr(10))'
    result = run_script(script, num_processes=2, config=SECTION, env={"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    assert result.check().lines("tunables") == ["tunables glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"] * 2
    assert with_large_pages(None) == "glibc.malloc.hugetlb=1"
    assert with_large_pages("glibc.malloc.hugetlb=0:a.b=1") == "glibc.malloc.hugetlb=0:a.b=1"


@pytest.mark.parametrize(
    "imports",
    [
        "import torch\nimport accelerate\n",
        "import accelerate\nimport torch\n",
        "import transformers\nimport accelerate\n",
        "from transformers import Trainer\nimport accelerate\n",
        "from accelerate.state import PartialState\nimport accelerate\n",
    ],
)
def test_import_orders(imports):
    result = run_ranks(imports + FACTS, num_processes=2, env={"PFEIFE_ENABLED": "true"}, fresh=True)
    assert facts_of(result) == ONE_PIPELINE


@pytest.mark.parametrize(
    "imports", ["import pfeife_accelerate\nimport accelerate\n", "import accelerate\nimport pfeife_accelerate\n"]
)
def test_import_of_the_package_replaces_the_entry_point(imports):
    env = {"PFEIFE_ENABLED": "true", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert facts_of(run_ranks(imports + FACTS, num_processes=2, env=env, fresh=True)) == ONE_PIPELINE


def test_without_the_entry_point_and_the_import_nothing_is_replaced():
    env = {"PFEIFE_ENABLED": "true", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ACCELERATE_USE_CPU": "true"}
    assert facts_of(run_ranks(SCRIPT, num_processes=2, env=env, fresh=True)) == [
        [2, 0, True, "0", "2"],
        [2, 1, False, "1", "2"],
    ]


def test_torchrun_with_the_environment(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    result = run_command([*command, str(tmp_path / "train.py")], env={"PFEIFE_PIPELINE_SIZE": "2"})
    assert facts_of(result) == ONE_PIPELINE


def refused(result, *texts):
    """Nothing was started, and the message stands alone."""
    assert result.returncode == 2, result.report()
    assert result.stdout == "", result.report()
    assert "Traceback" not in result.stderr
    for text in texts:
        assert text in result.stderr, result.report()


def test_unknown_key_is_refused_before_any_process_starts():
    result = run_script(SCRIPT, num_processes=2, config={"pfeife_config": {"pipline_size": 2}}, fresh=False)
    refused(result, "PF101 unknown key 'pipline_size'", "did you mean 'pipeline_size'?")
    assert result.stderr.startswith("PF101")


def test_unknown_variable_is_refused_before_any_process_starts():
    result = run_script(SCRIPT, num_processes=2, config=SECTION, env={"PFEIFE_VERBOS": "1"}, fresh=False)
    refused(result, "PF101 unknown variable 'PFEIFE_VERBOS'", "did you mean 'PFEIFE_VERBOSE'?")


def test_wrong_value_is_refused_before_any_process_starts():
    result = run_script(SCRIPT, num_processes=2, config={"pfeife_config": {"schedule": "1F1B"}}, fresh=False)
    refused(result, "PF102 schedule must be one of", "did you mean '1f1b'?")


def test_indivisible_processes_are_refused_before_any_process_starts():
    result = run_script(SCRIPT, num_processes=3, config=SECTION, fresh=False)
    refused(result, "PF120 3 processes cannot be divided into pipelines of 2", "num_processes: 4")


def test_other_engines_are_refused():
    result = run_script(SCRIPT, num_processes=2, config={"distributed_type": "FSDP", **SECTION}, fresh=False)
    refused(result, "PF123 pipelines cannot be combined with FSDP")


def test_a_launch_of_a_single_process_is_refused_where_several_are_needed():
    result = run_script(SCRIPT, num_processes=2, config=SECTION, launch_args=["--cpu"], fresh=False)
    refused(result, "PF103 a pipeline is configured, but accelerate would start a single process", "leave out --cpu")
    result = run_script(SCRIPT, num_processes=2, config={"distributed_type": "NO", **SECTION}, fresh=False)
    refused(result, "PF103")


def test_a_yaml_without_the_section_keeps_accelerates_own_behaviour():
    script = "import os, sys; sys.stdout.write(repr([n for n in os.environ if n.startswith('PFEIFE')]) + chr(10))"
    result = run_script(script, num_processes=2, config={})
    assert result.check().lines() == ["[]"]  # one process: MULTI_CPU alone does not start two
