"""A pipeline is one process to the script: what Accelerate and torch.distributed show, on every rank."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launching import Result, run_command, run_ranks, run_script

pytestmark = pytest.mark.gloo

# Each rank prints one JSON line of facts, in one write: lines of several ranks must not mix.
PROLOGUE = """
import json, os, sys, time
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, broadcast_object_list, gather_object, pad_across_processes, reduce

def report(**facts):
    sys.stdout.write(json.dumps({"world_rank": int(os.environ["RANK"]), **facts}) + chr(10))
    sys.stdout.flush()
"""

FACTS = (
    PROLOGUE
    + """
accelerator = Accelerator()
torch.manual_seed(0)
index = accelerator.process_index
mine = torch.tensor([index, 10 + index])
padded = accelerator.pad_across_processes(torch.ones(index + 1))
objects = [index, "of", index]
broadcast_object_list(objects)
ran = []
accelerator.on_main_process(lambda: ran.append("main"))()
accelerator.on_local_main_process(lambda: ran.append("local main"))()
accelerator.on_last_process(lambda: ran.append("last"))()
accelerator.on_process(process_index=0)(lambda: ran.append("process 0"))()
accelerator.on_local_process(local_process_index=0)(lambda: ran.append("local process 0"))()
accelerator.print("printed once")
with accelerator.split_between_processes(list(range(6))) as part:
    pass
loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(10)), batch_size=2, shuffle=True))
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=1.0)
scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
optimizer.step()
scheduler.step()
batches = [batch.tolist() for batch in loader]
counted = []
for batch in loader:
    counted += accelerator.gather_for_metrics(batch).tolist()
report(
    num_processes=accelerator.num_processes,
    index=index,
    is_main=accelerator.is_main_process,
    state_is_main=PartialState().is_main_process,
    is_local_main=accelerator.is_local_main_process,
    is_last=[accelerator.is_last_process, accelerator.state.is_last_process],
    distributed_type=accelerator.distributed_type.value,
    use_distributed=accelerator.use_distributed,
    device=str(accelerator.device),
    world=[dist.get_world_size(), dist.get_rank()],
    gathered=accelerator.gather(mine).tolist(),
    gathered_objects=gather_object([index]),
    summed=accelerator.reduce(torch.tensor([1.0 + index]), "sum").tolist(),
    averaged=reduce(torch.tensor([1.0 + index]), "mean").tolist(),
    broadcast=broadcast(mine, from_process=accelerator.num_processes - 1).tolist(),
    broadcast_objects=objects,
    padded=padded.tolist(),
    part=part,
    ran=ran,
    num_batches=len(batches),
    batches=batches,
    counted=sorted(counted),
    learning_rate=scheduler.get_last_lr(),
    last_is_main=accelerator.is_main_process,
)
accelerator.wait_for_everyone()
accelerator.end_training()
accelerator.print("printed after the end")
accelerator.wait_for_everyone()
"""
)


def facts_of(result: Result) -> list[dict]:
    result.check()
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda fact: fact["world_rank"])


def check_silent(result: Result) -> None:
    # Gloo, c10d and accelerate all have something to say when processes leave in the wrong order.
    assert result.stderr.strip() == "", result.report()


def column(facts: list[dict], name: str) -> list:
    return [fact[name] for fact in facts]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_pipeline_looks_like_a_single_process(num_ranks):
    if num_ranks == 3:
        result = run_ranks(FACTS, num_processes=3, env={"PFEIFE_ENABLED": "true"})
    else:
        result = run_script(FACTS, num_processes=num_ranks, config={"pfeife_config": {}})
    facts = facts_of(result)
    only_first = [True] + [False] * (num_ranks - 1)
    assert column(facts, "is_main") == column(facts, "state_is_main") == column(facts, "is_local_main") == only_first
    assert column(facts, "is_last") == [[first, first] for first in only_first]
    everything = ["main", "local main", "last", "process 0", "local process 0"]
    assert column(facts, "ran") == [everything if first else [] for first in only_first]
    assert result.stdout.count("printed once") == result.stdout.count("printed after the end") == 1
    for fact in facts:
        assert fact["num_processes"] == 1
        assert fact["index"] == 0
        assert fact["distributed_type"] == "NO"
        assert not fact["use_distributed"]
        assert fact["device"] == "cpu"
        assert fact["world"] == [1, 0]
        assert fact["gathered"] == fact["broadcast"] == [0, 10]
        assert fact["gathered_objects"] == [0]
        assert fact["summed"] == fact["averaged"] == [1.0]
        assert fact["padded"] == [1.0]
        assert fact["part"] == list(range(6))
        assert fact["num_batches"] == 5
        assert fact["counted"] == list(range(10))
        assert fact["learning_rate"] == [0.5]
    check_silent(result)


@pytest.mark.parametrize(("num_ranks", "pipeline_size"), [(2, 1), (4, 2)])
def test_two_pipelines_look_like_two_processes(num_ranks, pipeline_size):
    env = {"PFEIFE_PIPELINE_SIZE": str(pipeline_size), "ACCELERATE_USE_CPU": "true"}
    result = run_ranks(FACTS, num_processes=num_ranks, env=env)
    facts = facts_of(result)
    assert column(facts, "index") == [rank // pipeline_size for rank in range(num_ranks)]
    assert column(facts, "is_main") == column(facts, "is_local_main") == [rank == 0 for rank in range(num_ranks)]
    is_last = [rank == num_ranks - pipeline_size for rank in range(num_ranks)]
    assert column(facts, "is_last") == [[last, last] for last in is_last]
    ran = [[] for _ in range(num_ranks)]
    ran[0] += ["main", "local main"]
    ran[num_ranks - pipeline_size] += ["last"]
    ran[0] += ["process 0", "local process 0"]
    assert column(facts, "ran") == ran
    assert result.stdout.count("printed once") == result.stdout.count("printed after the end") == 1
    for fact in facts:
        assert fact["num_processes"] == 2
        assert fact["distributed_type"] == "MULTI_CPU"
        assert fact["use_distributed"]
        assert fact["world"] == [2, fact["index"]]
        assert fact["gathered"] == [0, 10, 1, 11]
        assert fact["gathered_objects"] == [0, 1]
        assert fact["summed"] == [3.0]
        assert fact["averaged"] == [1.5]
        assert fact["broadcast"] == [1, 11]
        assert fact["broadcast_objects"] == [0, "of", 0]
        assert fact["padded"] == ([1.0, 0.0] if fact["index"] == 0 else [1.0, 1.0])
        assert fact["part"] == ([0, 1, 2] if fact["index"] == 0 else [3, 4, 5])
        assert fact["num_batches"] == 3
        assert fact["counted"] == list(range(10))
        assert fact["learning_rate"] == [pytest.approx(1 / 3)]
    # All ranks of a pipeline were given the same batches, the pipelines different ones.
    assert len({json.dumps(fact["batches"]) for fact in facts if fact["index"] == 0}) == 1
    assert facts[0]["batches"] != facts[-1]["batches"]
    check_silent(result)


GROUPS = (
    PROLOGUE
    + """
from pfeife_accelerate import session
accelerator = Accelerator()
mesh = session.current().mesh
# A group of the script's own, over pipelines, as libraries make them.
nested = dist.new_group([0, 1])
alone = dist.new_group([accelerator.process_index], use_local_synchronization=True)
value = torch.tensor([float(os.environ["RANK"])])
over_nested = value.clone(); dist.all_reduce(over_nested, group=nested)
over_alone = value.clone(); dist.all_reduce(over_alone, group=alone)
over_default = value.clone(); dist.all_reduce(over_default)
over_pipeline = value.clone(); dist.all_reduce(over_pipeline, group=mesh.pipeline_group)
everyone = [None] * mesh.world_size
dist.all_gather_object(everyone, mesh.world_rank, group=mesh.world_control_group)
message = [mesh.pipeline_index if mesh.rank == 1 else None]
dist.broadcast_object_list(message, group_src=1, group=mesh.pipeline_control_group)
received = torch.zeros(1)
if mesh.rank == 0:
    dist.send(value, group_dst=1, group=mesh.pipeline_group)
else:
    dist.recv(received, group_src=0, group=mesh.pipeline_group)
other = 1 - mesh.rank
buffer = torch.zeros(1)
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, value, group=mesh.pipeline_group, group_peer=other),
    dist.P2POp(dist.irecv, buffer, group=mesh.pipeline_group, group_peer=other),
]):
    work.wait()
report(
    ranks=[dist.get_rank(mesh.pipeline_group), dist.get_rank(mesh.pipeline_control_group),
           dist.get_rank(mesh.world_control_group), dist.get_rank(mesh.replica_group), dist.get_rank(nested)],
    over_nested=over_nested.item(), over_alone=over_alone.item(), over_default=over_default.item(),
    over_pipeline=over_pipeline.item(), everyone=everyone, message=message, received=received.item(),
    exchanged=buffer.item(),
)
dist.destroy_process_group()
report(after=dist.is_initialized())
"""
)


def test_groups_of_the_script_and_our_own_work_side_by_side():
    result = run_ranks(GROUPS, num_processes=4, env={"PFEIFE_PIPELINE_SIZE": "2"})
    facts = [fact for fact in facts_of(result) if "ranks" in fact]
    for rank, fact in enumerate(facts):
        pipeline, position = divmod(rank, 2)
        assert fact["ranks"] == [position, position, rank, pipeline, pipeline]
        assert fact["over_nested"] == fact["over_default"] == 2 * position + 2
        assert fact["over_alone"] == rank
        assert fact["over_pipeline"] == 4 * pipeline + 1
        assert fact["everyone"] == [0, 1, 2, 3]
        assert fact["message"] == [pipeline]
        assert fact["received"] == (2 * pipeline if position == 1 else 0)
        assert fact["exchanged"] == 2 * pipeline + 1 - position
    assert column([fact for fact in facts_of(result) if "after" in fact], "after") == [False] * 4
    check_silent(result)


WAITING = (
    PROLOGUE
    + """
accelerator = Accelerator()
rank = int(os.environ["RANK"])
folder = sys.argv[1]
# Without a wait for all ranks, the others would look before the file is there.
for number, wait in enumerate((accelerator.wait_for_everyone, PartialState().wait_for_everyone, dist.barrier)):
    path = os.path.join(folder, str(number))
    if accelerator.is_main_process:
        time.sleep(0.3)
        open(path, "w").close()
    wait()
    assert os.path.exists(path), number
for number, first in enumerate((accelerator.main_process_first, accelerator.local_main_process_first)):
    path = os.path.join(folder, "first" + str(number))
    with first():
        if accelerator.is_main_process:
            time.sleep(0.3)
            open(path, "w").close()
        assert os.path.exists(path), number
# One rank leaves late: the others wait for it at the end, because it may still need them.
if rank == 0:
    time.sleep(1.0)
"""
)


@pytest.mark.parametrize(("num_ranks", "pipeline_size"), [(2, 2), (4, 2)])
def test_waiting_is_for_all_ranks(num_ranks, pipeline_size, tmp_path):
    env = {"PFEIFE_PIPELINE_SIZE": str(pipeline_size)}
    result = run_ranks(WAITING, num_processes=num_ranks, args=[str(tmp_path)], env=env).check()
    check_silent(result)


def test_a_state_that_is_reset_and_made_again_keeps_the_view():
    script = (
        PROLOGUE
        + """
from accelerate.state import AcceleratorState
for _ in range(2):
    state = PartialState()
    report(view=[state.num_processes, state.process_index, state.distributed_type.value, state.is_main_process])
    AcceleratorState._reset_state(reset_partial_state=True)
"""
    )
    result = run_ranks(script, num_processes=2, env={"PFEIFE_ENABLED": "true"})
    assert column(facts_of(result), "view") == [[1, 0, "NO", True]] * 2 + [[1, 0, "NO", False]] * 2
    check_silent(result)


@pytest.mark.parametrize("before", ["", "PartialState(cpu=True)", "Accelerator(cpu=True)"])
def test_plugin_as_keyword_needs_no_environment(before):
    script = (
        PROLOGUE
        + before
        + """
from pfeife_accelerate import PfeifePlugin
accelerator = Accelerator(pfeife_plugin=PfeifePlugin(pipeline_size=2))
view = [accelerator.num_processes, accelerator.process_index, accelerator.is_main_process, str(accelerator.device)]
report(view=view)
Accelerator()
Accelerator(pfeife_plugin=PfeifePlugin(pipeline_size=2))
try:
    Accelerator(pfeife_plugin=PfeifePlugin(pipeline_size=1))
except ValueError as error:
    report(refused=str(error)[:5])
"""
    )
    result = run_ranks(script, num_processes=2)
    assert column([fact for fact in facts_of(result) if "view" in fact], "view") == [
        [1, 0, True, "cpu"],
        [1, 0, False, "cpu"],
    ]
    assert column([fact for fact in facts_of(result) if "refused" in fact], "refused") == ["PF122"] * 2
    check_silent(result)


def test_an_exception_on_one_rank_ends_the_others_at_once():
    script = (
        PROLOGUE
        + """
accelerator = Accelerator()
if os.environ["RANK"] == "1":
    raise RuntimeError("rank one is broken")
accelerator.wait_for_everyone()
"""
    )
    result = run_ranks(script, num_processes=2, env={"PFEIFE_ENABLED": "true"}, timeout=60)
    assert result.returncode not in (0, None), result.report()
    assert "rank one is broken" in result.stderr
    assert result.wall_s < 25, result.report()


def test_a_single_process_warns_and_trains_without_a_pipeline():
    script = "from accelerate import Accelerator; a = Accelerator(); print(a.num_processes, a.is_main_process)"
    command = [sys.executable, "-c", script]
    result = run_command(command, env={"PFEIFE_ENABLED": "true"}).check()
    assert result.stdout.split() == ["1", "True"]
    assert "a pipeline is configured but this script runs in a single process" in result.stderr
    refused = run_command(command, env={"PFEIFE_PIPELINE_SIZE": "2"})
    assert "PF120 1 processes cannot be divided into pipelines of 2" in refused.stderr
