"""Cost files of others: what is refused by name, and what is understood all the same."""

from __future__ import annotations

import gzip
import json
import math

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import read_cost_file


def data():
    nodes = [{"fwd_ms": 1.0, "bwd_ms": 2.0, "param_bytes": 10, "act_bytes": 20} for _ in range(4)]
    edges = [{"src": i, "dst": i + 1, "bytes": 5} for i in range(3)]
    return {"link": {"latency_ms": 0.1, "gb_per_s": 1}, "device_memory_bytes": 1000, "nodes": nodes, "edges": edges}


def read(tmp_path, found):
    (tmp_path / "cost.json").write_text(json.dumps(found))
    return read_cost_file(tmp_path / "cost.json")


@pytest.mark.parametrize(
    ("place", "key", "value", "why"),
    [
        ((), "nodes", None, "nodes is missing"),
        ((), "nodes", [], "nodes is empty"),
        ((), "nodes", [1], r"nodes\[0\] is 1, not an object"),
        ((), "edges", {}, "edges is {}, not a list"),
        ((), "link", 3, "link is 3, not an object"),
        ((), "device_memory_bytes", "80GB", "device_memory_bytes is '80GB', not a number"),
        ((), "device_memory_bytes", math.nan, "device_memory_bytes is nan"),
        ((), "bytes_per_param", 0, "bytes_per_param is 0, not a number from 1e-09"),
        ((), "ranks_per_host", 0, "ranks_per_host is 0, not a whole number from 1"),
        (("link",), "gb_per_s", 0, "link.gb_per_s is 0"),
        (("link",), "latency_ms", -1, "link.latency_ms is -1"),
        (("nodes", 2), "fwd_ms", math.nan, r"nodes\[2\].fwd_ms is nan, not a number from 0 to 1e\+09"),
        (("nodes", 2), "fwd_ms", -1.0, r"nodes\[2\].fwd_ms is -1.0"),
        (("nodes", 2), "bwd_ms", 1e300, r"nodes\[2\].bwd_ms is 1e\+300"),
        (("nodes", 2), "act_bytes", None, r"nodes\[2\].act_bytes is missing"),
        (("nodes", 2), "act_bytes", "5", r"nodes\[2\].act_bytes is '5'"),
        (("nodes", 2), "act_bytes", 10**400, r"nodes\[2\].act_bytes is 1000"),
        (("nodes", 2), "bwd_input_ms", 1.0, r"nodes\[2\].bwd_weight_ms is missing"),
        (("nodes", 2), "tied_to", 3, r"nodes\[2\].tied_to is 3, not a whole number from 0 to 2"),
        (("nodes", 2), "tied_to", [0], r"nodes\[2\].tied_to is \[0\]"),
        (("edges", 1), "src", 0.5, r"edges\[1\].src is 0.5"),
        (("edges", 1), "dst", 9, r"edges\[1\].dst is 9, not a whole number from 0 to 3"),
        (("edges", 1), "dst", 0, r"edges\[1\] goes from node 1 to node 0"),
        (("edges", 1), "bytes", math.inf, r"edges\[1\].bytes is inf"),
        (("edges", 1), "t", [1], r"edges\[1\].t is \[1\], not a number or a text"),
        (("edges", 1), "grad", "no", r"edges\[1\].grad is 'no'"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(tmp_path, place, key, value, why):
    found = row = data()
    for step in place:
        row = row[step]
    row[key] = value
    with pytest.raises(PfeifeError, match=rf"PF166 (.|\n)*why +{why}(.|\n)*try"):
        read(tmp_path, found)


@pytest.mark.parametrize("found", [[], None, 3, "text"])
def test_what_is_no_object_is_refused(tmp_path, found):
    with pytest.raises(PfeifeError, match=r"PF166 (.|\n)*the file is .*, not an object"):
        read(tmp_path, found)


def test_a_damaged_file_is_refused(tmp_path):
    packed = bytearray(gzip.compress(json.dumps(data()).encode()))
    packed[15:25] = b"\xff" * 10
    (tmp_path / "cost.json.gz").write_bytes(bytes(packed))
    with pytest.raises(PfeifeError, match="PF166"):
        read_cost_file(tmp_path / "cost.json.gz")


@pytest.mark.parametrize(("name", "is_packed"), [("cost.json", True), ("cost.json.gz", False)])
def test_packed_is_what_looks_so_whatever_its_name(tmp_path, name, is_packed):
    text = json.dumps(data()).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if is_packed else text)
    graph, _ = read_cost_file(tmp_path / name)
    assert len(graph.nodes) == 4


def test_numbers_written_as_floats_and_parts_of_a_byte(tmp_path):
    found = data()
    found["edges"][0] |= {"src": 0.0, "dst": 1.0, "bytes": 4.5, "t": None}
    found["nodes"][1] |= {"act_bytes": 1.5, "temp_bytes": None, "param_bytes": 0.5}
    found["device_memory_bytes"] = math.inf
    graph, machine = read(tmp_path, found)
    assert (graph.values[0].readers, graph.values[0].num_bytes) == ((1,), 5)
    assert (graph.nodes[1].saved_bytes, graph.nodes[1].params[0].state_bytes) == (2, 4)
    assert machine.device_of(0).memory_bytes == 10**18


def test_tensors_may_have_texts_and_numbers(tmp_path):
    found = data()
    found["edges"] += [{"src": 0, "dst": reader, "bytes": 7, "t": "a"} for reader in (2, 3, 3)]
    graph, _ = read(tmp_path, found)
    assert [(v.producer, v.readers) for v in graph.values] == [(0, (1,)), (0, (2, 3)), (1, (2,)), (2, (3,))]


def test_who_shares_with_one_that_shares_reads_the_first_ones_parameters(tmp_path):
    found = data()
    found["nodes"][2]["tied_to"] = 1
    found["nodes"][3]["tied_to"] = 2.0
    graph, _ = read(tmp_path, found)
    assert [node.params[0].owner for node in graph.nodes] == [0, 1, 1, 1]


def test_a_link_may_be_infinitely_fast(tmp_path):
    found = data()
    found["link"]["gb_per_s"] = math.inf
    _, machine = read(tmp_path, found)
    assert machine.link_of(0, 1).transfer_s(10**9) == pytest.approx(1e-4)
