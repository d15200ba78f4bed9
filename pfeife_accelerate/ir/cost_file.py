"""Cost graphs as files: JSON, gzipped where the name ends in `.gz`.

Format: `nodes` in topological order with `fwd_ms`, `bwd_ms` (or `bwd_input_ms` and `bwd_weight_ms`), `param_bytes`,
`act_bytes`, `temp_bytes`, `optim_ms`, `op`, and `tied_to` where an operation reads the parameters of an earlier one;
`edges` with `src`, `dst`, `bytes`, `t` (equal for the readers of one tensor) and `grad`; `link` with `latency_ms` and
`gb_per_s`, and where there are several hosts `link_between_hosts` and `ranks_per_host`; `device_memory_bytes`;
`action_ms` and `runs_ahead` as in `DeviceSpec`; `state_bytes` of a node, or `state_bytes_per_param` bytes of parameter,
gradient and optimizer state for each parameter of `bytes_per_param` bytes.
Ignores: keys it does not know, so that a file may say more than the planner reads.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.cost_graph import CostGraph, CostNode, CostValue, ParamUse
from pfeife_accelerate.ir.machine import DeviceSpec, LinkSpec, Machine

__all__ = ["read_cost_file", "write_cost_file"]

_STATE_BYTES, _PARAM_BYTES = 16, 2  # mixed precision training with Adam
_MS, _GB = 1e-3, 1e9


def read_cost_file(path: Path) -> tuple[CostGraph, Machine]:
    """The graph and the machine that its file describes.

    Raises: PfeifeError PF166 where the file is not what this module's docstring says.
    """
    try:
        packed = path.read_bytes()
        data = json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed)
        return _graph(data, path.name.split(".")[0]), _machine(data)
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError) as error:
        raise PfeifeError(
            id="PF166",
            what=f"{path} is not a cost graph",
            why=f"{type(error).__name__}: {error}",
            hints=("the format is described in docs/planner.md",),
        ) from error


def _graph(data: dict[str, Any], name: str) -> CostGraph:
    ratio = data.get("state_bytes_per_param", _STATE_BYTES) / data.get("bytes_per_param", _PARAM_BYTES)
    nodes: list[CostNode] = []
    for index, row in enumerate(data["nodes"]):
        owner = row.get("tied_to")
        use = ParamUse(
            owner=index if owner is None else owner,
            num_bytes=row["param_bytes"],
            state_bytes=row.get("state_bytes", round(row["param_bytes"] * ratio)),
            optimizer_s=row.get("optim_ms", 0.0) * _MS,
        )
        input_s, weight_s = _backward(row)
        nodes.append(
            CostNode(
                op=str(row.get("op", "?")),
                forward_s=row["fwd_ms"] * _MS,
                backward_input_s=input_s,
                backward_weight_s=weight_s,
                saved_bytes=row["act_bytes"],
                workspace_bytes=row.get("temp_bytes", 0),
                params=(use,) if use.num_bytes or use.optimizer_s else (),
                cut_allowed=row.get("cut_allowed", True),
            )
        )
    readers: dict[tuple[int, int], set[int]] = {}
    sizes: dict[tuple[int, int], tuple[int, bool]] = {}
    for row in data["edges"]:
        key = (row["src"], row.get("t", 0))
        readers.setdefault(key, set()).add(row["dst"])
        _, grad = sizes.get(key, (0, False))
        sizes[key] = (row["bytes"], grad or bool(row.get("grad", 1)))
    values = tuple(
        CostValue(
            producer=key[0],
            readers=tuple(sorted(reads)),
            num_bytes=sizes[key][0],
            gradient_bytes=sizes[key][0] if sizes[key][1] else 0,
        )
        for key, reads in sorted(readers.items())
    )
    return CostGraph(name=data.get("name", name), nodes=tuple(nodes), values=values)


def _backward(row: dict[str, Any]) -> tuple[float, float]:
    if "bwd_input_ms" in row:
        return row["bwd_input_ms"] * _MS, row["bwd_weight_ms"] * _MS
    # A file that does not tell: the two gradients of a product are products of the same size.
    halves = 2 if row["param_bytes"] else 1
    return row["bwd_ms"] * _MS / halves, row["bwd_ms"] * _MS * (1 - 1 / halves)


def _machine(data: dict[str, Any]) -> Machine:
    between = data.get("link_between_hosts")
    device = DeviceSpec(
        name=data.get("device", "device"),
        memory_bytes=int(data["device_memory_bytes"]),
        flops_per_s=(),
        bytes_per_s=0.0,
        launch_s=0.0,
        action_s=data.get("action_ms", 0.0) * _MS,
        runs_ahead=data.get("runs_ahead", True),
    )
    return Machine(
        devices=(device,),
        link=_link(data["link"]),
        ranks_per_host=data.get("ranks_per_host"),
        link_between_hosts=None if between is None else _link(between),
    )


def _link(data: dict[str, Any]) -> LinkSpec:
    return LinkSpec(latency_s=data["latency_ms"] * _MS, bytes_per_s=data["gb_per_s"] * _GB)


def _link_row(link: LinkSpec) -> dict[str, float]:
    return {"latency_ms": link.latency_s / _MS, "gb_per_s": link.bytes_per_s / _GB}


def write_cost_file(path: Path, graph: CostGraph, machine: Machine) -> None:
    """Write what `read_cost_file` reads; the ratio of state bytes is that of all parameters together."""
    uses = [use for node in graph.nodes for use in node.params]
    num_bytes = sum(use.num_bytes for use in uses)
    device = machine.device_of(0)
    first: dict[int, int] = {}
    data: dict[str, Any] = {
        "name": graph.name,
        "device": device.name,
        "device_memory_bytes": device.memory_bytes,
        "action_ms": device.action_s / _MS,
        "runs_ahead": device.runs_ahead,
        "link": _link_row(machine.link),
        "bytes_per_param": 1,
        "state_bytes_per_param": sum(use.state_bytes for use in uses) / num_bytes if num_bytes else 1,
        "nodes": [_row(index, node, first) for index, node in enumerate(graph.nodes)],
        "edges": [
            {"src": v.producer, "dst": reader, "bytes": v.num_bytes, "t": number, "grad": int(v.gradient_bytes > 0)}
            for number, v in enumerate(graph.values)
            for reader in v.readers
        ],
    }
    if machine.link_between_hosts is not None:
        data["link_between_hosts"] = _link_row(machine.link_between_hosts)
        data["ranks_per_host"] = machine.ranks_per_host
    text = json.dumps(data, allow_nan=False)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


def _row(index: int, node: CostNode, first: dict[int, int]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": node.op,
        "fwd_ms": node.forward_s / _MS,
        "bwd_ms": node.backward_s / _MS,
        "bwd_input_ms": node.backward_input_s / _MS,
        "bwd_weight_ms": node.backward_weight_s / _MS,
        "param_bytes": sum(use.num_bytes for use in node.params),
        "state_bytes": sum(use.state_bytes for use in node.params),
        "act_bytes": node.saved_bytes,
        "temp_bytes": node.workspace_bytes,
        "optim_ms": sum(use.optimizer_s for use in node.params) / _MS,
        "cut_allowed": node.cut_allowed,
    }
    earlier = [first[use.owner] for use in node.params if use.owner in first]
    if earlier:
        row["tied_to"] = earlier[0]
    for use in node.params:
        first.setdefault(use.owner, index)
    return row
