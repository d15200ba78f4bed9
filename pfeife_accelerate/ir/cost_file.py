"""Cost graphs as files: JSON, gzipped where the name ends in `.gz`.

Format: `nodes` in topological order with `fwd_ms`, `bwd_ms` (or `bwd_input_ms` and `bwd_weight_ms`), `param_bytes`,
`act_bytes`, `temp_bytes`, `optim_ms`, `op`, and `tied_to` where an operation reads the parameters of an earlier one;
`edges` with `src`, `dst`, `bytes`, `t` (equal for the readers of one tensor) and `grad`; `link` with `latency_ms` and
`gb_per_s` (and `is_copied`, see `LinkSpec`), and where there are several hosts `link_between_hosts` and
`ranks_per_host`; `device_memory_bytes`; `action_ms` and `runs_ahead` as in `DeviceSpec`; `state_bytes` of a node, or
`state_bytes_per_param` bytes of parameter, gradient and optimizer state for each parameter of `bytes_per_param` bytes.
Ignores: keys it does not know, so that a file may say more than the planner reads.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.cost_graph import CostGraph, CostNode, CostValue, ParamUse
from pfeife_accelerate.ir.cost_row import MOST_BYTES, CostRow, WrongRow
from pfeife_accelerate.ir.machine import DeviceSpec, LinkSpec, Machine

__all__ = ["read_cost_file", "write_cost_file"]

_STATE_BYTES, _PARAM_BYTES = 16, 2  # mixed precision training with Adam
_MS, _GB = 1e-3, 1e9
_GZIP = b"\x1f\x8b"  # what a packed file begins with, whatever its name
_MOST_MS = 1e9  # longer than any operation, and sums of it stay exact enough
_LEAST_RATE = 1e-9


def read_cost_file(path: Path) -> tuple[CostGraph, Machine]:
    """The graph and the machine that its file describes.

    Raises: PfeifeError PF166 where the file is not what this module's docstring says.
    """
    try:
        packed = path.read_bytes()
        data = json.loads(gzip.decompress(packed) if packed[:2] == _GZIP else packed)
        row = CostRow(data, "")
        return _graph(row, path.name.split(".")[0]), _machine(row)
    except WrongRow as error:
        why = str(error)
    except PfeifeError as error:
        why = error.what
    except (OSError, ValueError, EOFError, zlib.error, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise PfeifeError(
        id="PF166", what=f"{path} is not a cost graph", why=why, hints=("the format is described in docs/planner.md",)
    )


def _graph(data: CostRow, name: str) -> CostGraph:
    ratio = data.number("state_bytes_per_param", _STATE_BYTES) / data.number(
        "bytes_per_param", _PARAM_BYTES, least=_LEAST_RATE
    )
    nodes: list[CostNode] = []
    owners: list[int] = []
    for index, row in enumerate(data.rows("nodes")):
        # An operation that shares with one that shares reads the parameters of the first.
        tied_to = row.index("tied_to", index + 1, index)
        owners.append(index if tied_to == index else owners[tied_to])
        num_bytes = row.bytes("param_bytes")
        use = ParamUse(
            owner=owners[index],
            num_bytes=num_bytes,
            state_bytes=row.bytes("state_bytes", math.ceil(row.number("param_bytes") * ratio)),
            optimizer_s=row.number("optim_ms", 0.0, most=_MOST_MS) * _MS,
        )
        input_s, weight_s = _backward(row)
        nodes.append(
            CostNode(
                op=row.text("op", "?"),
                forward_s=row.number("fwd_ms", most=_MOST_MS) * _MS,
                backward_input_s=input_s,
                backward_weight_s=weight_s,
                saved_bytes=row.bytes("act_bytes"),
                workspace_bytes=row.bytes("temp_bytes", 0),
                params=(use,) if use.num_bytes or use.optimizer_s else (),
                cut_allowed=bool(row.number("cut_allowed", True)),
            )
        )
    if not nodes:
        raise WrongRow("nodes is empty")
    return CostGraph(name=data.text("name", name), nodes=tuple(nodes), values=_values(data, len(nodes)))


def _values(data: CostRow, num_nodes: int) -> tuple[CostValue, ...]:
    readers: dict[tuple[int, bool, Any], set[int]] = {}
    sizes: dict[tuple[int, bool, Any], tuple[int, bool]] = {}
    for row in data.rows("edges"):
        tensor = row.label("t", 0)
        key = (row.index("src", num_nodes), isinstance(tensor, str), tensor)
        reader = row.index("dst", num_nodes)
        if reader <= key[0]:
            raise WrongRow(f"{row.where} goes from node {key[0]} to node {reader}, which is not a later one")
        readers.setdefault(key, set()).add(reader)
        _, grad = sizes.get(key, (0, False))
        sizes[key] = (row.bytes("bytes"), grad or bool(row.number("grad", 1)))
    return tuple(
        CostValue(
            producer=key[0],
            readers=tuple(sorted(reads)),
            num_bytes=sizes[key][0],
            gradient_bytes=sizes[key][0] if sizes[key][1] else 0,
        )
        for key, reads in sorted(readers.items())
    )


def _backward(row: CostRow) -> tuple[float, float]:
    if row.has("bwd_input_ms"):
        return (
            row.number("bwd_input_ms", most=_MOST_MS) * _MS,
            row.number("bwd_weight_ms", most=_MOST_MS) * _MS,
        )
    # A file that does not tell: the two gradients of a product are products of the same size.
    halves = 2 if row.bytes("param_bytes") else 1
    both_s = row.number("bwd_ms", most=_MOST_MS) * _MS
    return both_s / halves, both_s * (1 - 1 / halves)


def _machine(data: CostRow) -> Machine:
    device = DeviceSpec(
        name=data.text("device", "device"),
        memory_bytes=int(min(data.number("device_memory_bytes", most=math.inf), MOST_BYTES)),
        flops_per_s=(),
        bytes_per_s=0.0,
        launch_s=0.0,
        action_s=data.number("action_ms", 0.0, most=_MOST_MS) * _MS,
        runs_ahead=bool(data.number("runs_ahead", True)),
    )
    return Machine(
        devices=(device,),
        link=_link(data.row("link")),
        ranks_per_host=data.index("ranks_per_host", MOST_BYTES, least=1) if data.has("ranks_per_host") else None,
        link_between_hosts=_link(data.row("link_between_hosts")) if data.has("link_between_hosts") else None,
    )


def _link(data: CostRow) -> LinkSpec:
    rate = data.number("gb_per_s", least=_LEAST_RATE, most=math.inf)  # inf: a transfer takes the latency alone
    return LinkSpec(
        latency_s=data.number("latency_ms", most=_MOST_MS) * _MS,
        bytes_per_s=rate * _GB,
        is_copied=bool(data.number("is_copied", False)),
    )


def _link_row(link: LinkSpec) -> dict[str, float]:
    row = {"latency_ms": link.latency_s / _MS, "gb_per_s": link.bytes_per_s / _GB}
    return {**row, "is_copied": True} if link.is_copied else row


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
