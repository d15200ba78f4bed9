"""Cost graphs and machines for the planner's tests: drawn at random, or as plain as a textbook's."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pfeife_accelerate.ir import CostGraph, CostNode, CostValue, DeviceSpec, LinkSpec, Machine, ParamUse

ROOMY = 2**50


def device(*, memory_bytes: int = ROOMY, action_s: float = 0.0, runs_ahead: bool = True) -> DeviceSpec:
    """A device of which the planner's numbers alone matter."""
    return DeviceSpec(
        name="test",
        memory_bytes=memory_bytes,
        flops_per_s=(),
        bytes_per_s=1.0,
        launch_s=0.0,
        action_s=action_s,
        runs_ahead=runs_ahead,
    )


def machine(
    *,
    latency_s: float = 0.0,
    bytes_per_s: float = float("inf"),
    memory_bytes: int | Sequence[int] = ROOMY,
    action_s: float = 0.0,
    runs_ahead: bool = True,
    between: LinkSpec | None = None,
) -> Machine:
    """One kind of device, or one for each entry of `memory_bytes`; with `between`, two ranks share a host."""
    sizes = (memory_bytes,) if isinstance(memory_bytes, int) else tuple(memory_bytes)
    return Machine(
        devices=tuple(device(memory_bytes=size, action_s=action_s, runs_ahead=runs_ahead) for size in sizes),
        link=LinkSpec(latency_s=latency_s, bytes_per_s=bytes_per_s),
        ranks_per_host=None if between is None else 2,
        link_between_hosts=between,
    )


def use(owner: int, num_bytes: int = 4, *, state_bytes: int | None = None, optimizer_s: float = 0.0) -> ParamUse:
    """A parameter whose gradient and states take three times its own bytes."""
    state = 4 * num_bytes if state_bytes is None else state_bytes
    return ParamUse(owner=owner, num_bytes=num_bytes, state_bytes=state, optimizer_s=optimizer_s)


def node(
    forward_s: float = 1.0,
    *,
    backward: tuple[float, float] | None = None,
    saved: int = 0,
    workspace: int = 0,
    params: Sequence[ParamUse] = (),
    cut: bool = True,
) -> CostNode:
    """An operation; each half of its backward takes as long as its forward."""
    halves = (forward_s, forward_s) if backward is None else backward
    return CostNode(
        op="op",
        forward_s=forward_s,
        backward_input_s=halves[0],
        backward_weight_s=halves[1],
        saved_bytes=saved,
        workspace_bytes=workspace,
        params=tuple(params),
        cut_allowed=cut,
    )


def chain(
    nodes: int | Sequence[CostNode], *, num_bytes: int = 1, skips: Sequence[tuple[int, int]] = (), frozen: int = 0
) -> CostGraph:
    """Each operation reads the one before; `skips` are further reads, the first `frozen` values have no gradient."""
    nodes = tuple(node() for _ in range(nodes)) if isinstance(nodes, int) else tuple(nodes)
    values = tuple(
        CostValue(
            producer=index,
            readers=tuple(sorted({index + 1, *(reader for producer, reader in skips if producer == index)})),
            num_bytes=num_bytes,
            gradient_bytes=0 if index < frozen else num_bytes,
        )
        for index in range(len(nodes) - 1)
    )
    return CostGraph(name="chain", nodes=nodes, values=values)


def random_cost_graph(seed: int, *, least: int = 4, most: int = 12, connected: bool = False) -> CostGraph:
    """Skips, parallel branches, frozen parts, tied parameters, free operations, forbidden cuts; or a chain with skips.

    Where the graph is not `connected`, an operation may read nothing, or nothing of the one before it.
    """
    rng = random.Random(f"cost graph {seed}")
    number = rng.randint(least, most)
    coarse = rng.random() < 0.5
    readers: list[list[int]] = [[] for _ in range(number)]
    owners = [rng.choice((index, index, index, 0)) for index in range(number)]
    sizes = [rng.randint(0, 20) for _ in range(number)]
    nodes = []
    for index in range(number):
        before = {rng.randrange(index) for _ in range(rng.choice((0, 1, 1, 2)))} if index else set()
        if index and (connected or rng.random() < 0.7):
            before.add(index - 1)
        for producer in before:
            readers[producer].append(index)
        seconds = (
            float(rng.randint(0, 3)) if coarse else rng.choice((0.0, rng.uniform(0.1, 3.0), rng.uniform(0.1, 3.0)))
        )
        owner = owners[index]
        nodes.append(
            node(
                seconds,
                backward=(seconds * rng.choice((0.0, 0.5, 1.0, 2.0)), seconds * rng.choice((0.0, 1.0))),
                saved=rng.randint(0, 30),
                workspace=rng.randint(0, 30),
                params=(use(owner, sizes[owner], optimizer_s=(owner % 3) * 0.3),) if rng.random() < 0.6 else (),
                cut=rng.random() < 0.85,
            )
        )
    values = []
    for producer, found in enumerate(readers):
        if found:
            num_bytes = rng.choice((0, rng.randint(1, 9)))
            gradient_bytes = num_bytes if rng.random() < 0.7 else 0
            values.append(
                CostValue(producer=producer, readers=tuple(found), num_bytes=num_bytes, gradient_bytes=gradient_bytes)
            )
    return CostGraph(name=f"random {seed}", nodes=tuple(nodes), values=tuple(values))


def random_machine(seed: int, num_ranks: int) -> Machine:
    """One or two kinds of links, host time for an action or none, devices that run ahead or do not."""
    rng = random.Random(f"machine {seed}")
    between = LinkSpec(latency_s=rng.uniform(0, 2), bytes_per_s=rng.uniform(1, 20)) if rng.random() < 0.5 else None
    return machine(
        latency_s=rng.choice((0.0, rng.uniform(0, 1))),
        bytes_per_s=rng.choice((float("inf"), rng.uniform(2, 50))),
        memory_bytes=tuple(rng.randint(10**6, 10**7) for _ in range(num_ranks)) if rng.random() < 0.3 else ROOMY,
        action_s=rng.choice((0.0, rng.uniform(0.1, 2))),
        runs_ahead=rng.random() < 0.5,
        between=between,
    )
