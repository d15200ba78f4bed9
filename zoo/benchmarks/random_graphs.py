"""Random cost graphs of the kinds that real models have, for a planner that must not be tuned to three of them.

Models: transformers of varied widths with masks that need no gradient; U-Nets with skips; chains between a heavy
embedding and a heavy head that may share a parameter; decoders that all read one encoder. Random links and ratios.
Ignores: shapes and operations; times and sizes are drawn, bound together as loosely as in real models.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pfeife_accelerate.ir import CostGraph, CostNode, CostValue, DeviceSpec, LinkSpec, Machine, ParamUse

__all__ = ["KINDS", "GraphBuilder", "random_graph", "random_machine", "small_graph", "transformer_of"]

_STATE_RATIO = 8  # mixed precision with Adam
_LEAST_S = 5e-6
_MIB = 2**20


class GraphBuilder:
    """Collects operations one by one; each is known by its number."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self.rng = name, rng
        self.nodes: list[CostNode] = []
        self._readers: list[list[int]] = []
        self._sizes: list[tuple[int, bool]] = []

    def add(
        self,
        op: str,
        seconds: float,
        *reads: int,
        ratio: float = 2.0,
        out_bytes: float = 0,
        param_bytes: float = 0,
        saved_bytes: float = 0,
        gradient: bool = True,
        tied_to: int | None = None,
    ) -> int:
        """One operation: `ratio` is the time of its backward over that of its forward. Gives its number."""
        number = len(self.nodes)
        owner = number if tied_to is None else tied_to
        use = ParamUse(
            owner=owner,
            num_bytes=int(param_bytes),
            state_bytes=int(param_bytes) * _STATE_RATIO,
            optimizer_s=param_bytes * 11 / 1.5e12,  # parameter, gradient and states are read or written once
        )
        seconds = max(seconds, _LEAST_S)
        backward_s = seconds * ratio if gradient else 0.0
        self.nodes.append(
            CostNode(
                op=op,
                forward_s=seconds,
                backward_input_s=backward_s / 2 if param_bytes else backward_s,
                backward_weight_s=backward_s / 2 if param_bytes else 0.0,
                saved_bytes=int(saved_bytes) if gradient else 0,
                workspace_bytes=int(out_bytes * self.rng.uniform(1, 2)),
                params=(use,) if param_bytes else (),
            )
        )
        self._readers.append([])
        self._sizes.append((max(1, int(out_bytes)), gradient))
        for read in reads:
            self._readers[read].append(number)
        return number

    def graph(self) -> CostGraph:
        """The graph of what was added."""
        values = tuple(
            CostValue(
                producer=number,
                readers=tuple(sorted(set(readers))),
                num_bytes=num_bytes,
                gradient_bytes=num_bytes if gradient else 0,
            )
            for number, (readers, (num_bytes, gradient)) in enumerate(zip(self._readers, self._sizes, strict=True))
            if readers
        )
        return CostGraph(name=self.name, nodes=tuple(self.nodes), values=values)


def _block(builder: GraphBuilder, x: int, width: float, *context: int) -> int:
    """One transformer block: attention over `context` too, then a product up and down; `width` scales the times."""
    rng, size = builder.rng, 8 * _MIB * width
    unit = 4e-4 * width * width
    small = 4e-5 * width

    def product(op: str, share: float, read: int, out: float = 1.0) -> int:
        return builder.add(
            op, unit * share, read, out_bytes=size * out, saved_bytes=size, param_bytes=32 * _MIB * share * width**2
        )

    normed = builder.add("norm", small, x, ratio=1.7, out_bytes=size, saved_bytes=size)
    queries = [product(name, 1.0, normed) for name in ("q", "k", "v")]
    mixed = builder.add(
        "attention", unit * rng.uniform(0.3, 2.0), *queries, *context, ratio=2.5, out_bytes=size, saved_bytes=2 * size
    )
    summed = builder.add("add", small, x, product("o", 1.0, mixed), ratio=0.3, out_bytes=size)
    normed = builder.add("norm", small, summed, ratio=1.7, out_bytes=size, saved_bytes=size)
    up = product("up", 4.0, normed, 4.0)
    act = builder.add("gelu", small * 3, up, ratio=1.5, out_bytes=4 * size, saved_bytes=4 * size)
    return builder.add("add", small, summed, product("down", 4.0, act), ratio=0.3, out_bytes=size)


def transformer_of(num_ops: int) -> CostGraph:
    """A chain of equal blocks with `num_ops` operations in all."""
    builder = GraphBuilder(f"transformer-{num_ops}", random.Random(num_ops))
    x = builder.add("embedding", 1e-5, out_bytes=8 * _MIB, param_bytes=64 * _MIB)
    while len(builder.nodes) + 13 <= num_ops:
        x = _block(builder, x, 1.0)
    while len(builder.nodes) < num_ops:
        x = builder.add("head", 2e-4, x, out_bytes=8 * _MIB, param_bytes=4 * _MIB)
    return builder.graph()


def _transformer(builder: GraphBuilder) -> None:
    rng = builder.rng
    mask = builder.add("mask", 0, out_bytes=_MIB, gradient=False)
    x = builder.add("embedding", 2e-5, out_bytes=8 * _MIB, param_bytes=rng.uniform(8, 300) * _MIB)
    width, groups = rng.uniform(0.3, 1.2), rng.randint(1, 4)
    for _ in range(groups):
        for _ in range(rng.randint(3, 12)):
            x = _block(builder, x, width, mask)
        width *= rng.choice((0.6, 1.0, 1.4))
    builder.add("head", rng.uniform(1e-4, 4e-3), x, param_bytes=rng.uniform(8, 300) * _MIB, saved_bytes=8 * _MIB)


def _u_net(builder: GraphBuilder) -> None:
    rng = builder.rng
    time = builder.add("time", 1e-5, out_bytes=64 * 1024, param_bytes=2 * _MIB)
    x = builder.add("conv", 1e-4, out_bytes=16 * _MIB, param_bytes=_MIB)
    skips: list[tuple[int, float]] = []
    levels = rng.randint(2, 4)
    size = rng.uniform(8, 32) * _MIB

    def residual(x: int, size: float) -> int:
        y = builder.add("norm", 5e-5, x, ratio=1.8, out_bytes=size, saved_bytes=size)
        y = builder.add("conv", rng.uniform(2e-4, 1.5e-3), y, out_bytes=size, saved_bytes=size, param_bytes=8 * _MIB)
        y = builder.add("add time", 3e-5, y, time, ratio=0.5, out_bytes=size)
        y = builder.add("conv", rng.uniform(2e-4, 1.5e-3), y, out_bytes=size, saved_bytes=size, param_bytes=8 * _MIB)
        y = builder.add("add", 3e-5, x, y, ratio=0.3, out_bytes=size)
        return _block(builder, y, rng.uniform(0.2, 0.8), time) if rng.random() < 0.4 else y

    for _ in range(levels):
        for _ in range(rng.randint(1, 4)):
            x = residual(x, size)
            skips.append((x, size))
        size /= rng.choice((1, 2, 4))
    for _ in range(rng.randint(1, 3)):
        x = residual(x, size)
    for skip, size in reversed(skips):
        x = builder.add("concatenate", 3e-5, x, skip, ratio=1.0, out_bytes=2 * size)
        x = residual(builder.add("conv", 4e-4, x, out_bytes=size, saved_bytes=2 * size, param_bytes=4 * _MIB), size)
    builder.add("out", 1e-4, x, saved_bytes=size)


def _heavy_ends(builder: GraphBuilder) -> None:
    rng = builder.rng
    vocabulary = rng.uniform(200, 1500) * _MIB
    embedding = x = builder.add("embedding", 3e-5, ratio=8.0, out_bytes=8 * _MIB, param_bytes=vocabulary)
    for _ in range(rng.randint(6, 24)):
        x = _block(builder, x, rng.choice((0.5, 0.6, 0.7)))
    x = builder.add("norm", 5e-5, x, ratio=1.7, out_bytes=8 * _MIB, saved_bytes=8 * _MIB)
    tied_to = embedding if rng.random() < 0.5 else None
    head_s = rng.uniform(1e-3, 8e-3)
    logits = builder.add(
        "head", head_s, x, out_bytes=200 * _MIB, saved_bytes=8 * _MIB, param_bytes=vocabulary, tied_to=tied_to
    )
    builder.add("loss", 4e-4, logits, ratio=1.0, saved_bytes=200 * _MIB)


def _encoder_decoder(builder: GraphBuilder) -> None:
    rng = builder.rng
    width, deeper = rng.uniform(0.3, 0.9), rng.uniform(0.3, 0.9)
    x = builder.add("embedding", 2e-5, out_bytes=8 * _MIB, param_bytes=64 * _MIB)
    for _ in range(rng.randint(4, 16)):
        x = _block(builder, x, width)
    encoded = x
    x = builder.add("embedding", 2e-5, out_bytes=8 * _MIB, param_bytes=64 * _MIB)
    for _ in range(rng.randint(4, 16)):
        x = _block(builder, x, deeper, encoded)
    builder.add("head", 1e-3, x, param_bytes=64 * _MIB, saved_bytes=8 * _MIB)


KINDS: dict[str, Callable[[GraphBuilder], None]] = {
    "transformer": _transformer,
    "u-net": _u_net,
    "heavy-ends": _heavy_ends,
    "encoder-decoder": _encoder_decoder,
}


def random_graph(seed: int) -> CostGraph:
    """One of the kinds, in turn."""
    kind = list(KINDS)[seed % len(KINDS)]
    builder = GraphBuilder(f"{kind}-{seed}", random.Random(seed))
    KINDS[kind](builder)
    return builder.graph()


def random_machine(seed: int, memory_bytes: int = 2**50) -> Machine:
    """A link between a slow network and the fastest one within a host; memory for anything unless it is given."""
    rng = random.Random(seed)
    link = LinkSpec(latency_s=10 ** rng.uniform(-5.3, -4), bytes_per_s=10 ** rng.uniform(10.0, 11.6))
    device = DeviceSpec(name="random", memory_bytes=memory_bytes, flops_per_s=(), bytes_per_s=0.0, launch_s=0.0)
    return Machine(devices=(device,), link=link)


def small_graph(seed: int) -> CostGraph:
    """Up to 14 operations with skips, masks and parameters, for brute force; the times of half of them tie."""
    rng = random.Random(seed)
    builder = GraphBuilder(f"small-{seed}", rng)
    coarse = rng.random() < 0.5
    for number in range(rng.randint(4, 14)):
        seconds = rng.randint(1, 4) * 1e-3 if coarse else rng.uniform(0.2, 4.0) * 1e-3
        skips = {rng.randrange(number) for _ in range(rng.choice((0, 0, 1, 2)))} if number else set()
        builder.add(
            "op",
            seconds,
            *sorted(skips | {number - 1} if number else skips),
            ratio=rng.choice((0.0, 1.0, 2.0, 2.0, 3.0)),
            out_bytes=rng.randint(1, 40) * _MIB,
            param_bytes=rng.choice((0, 0, 1, 10, 40)) * _MIB,
            saved_bytes=rng.randint(0, 40) * _MIB,
            gradient=rng.random() < 0.85,
        )
    return builder.graph()
