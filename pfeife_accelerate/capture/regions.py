"""Regions that the model wants computed again in the backward pass (`torch.utils.checkpoint`), as marks on operations.

Dynamo captures such a region as one operation that holds a graph. `inline_regions` puts its operations in the place of
that operation, so that they are cut, timed and numbered like any others. A region in a region belongs to the outer one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from pfeife_accelerate.compat import CHECKPOINTED, checkpoint_context_of

__all__ = ["Region", "inline_regions", "region_of"]

_MARK = "pfeife_region"


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """One region, equal to itself alone, since numbers begin anew in each captured piece.

    `context_fn` is what the model gave to `checkpoint` to say which operations are kept, if anything.
    """

    number: int
    context_fn: Callable[[], Any] | None = None


def region_of(node: fx.Node) -> Region | None:
    """The region that an operation belongs to."""
    return node.meta.get(_MARK)


def inline_regions(gm: fx.GraphModule) -> None:
    """Replace each region by its marked operations."""
    for number, node in enumerate([n for n in gm.graph.nodes if n.target is CHECKPOINTED]):
        body = _body(gm, node)
        inline_regions(body)
        _inline(gm, node, body, Region(number=number, context_fn=checkpoint_context_of(body)))


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    holder = node.args[0]
    assert isinstance(holder, fx.Node), "Dynamo gives a region's graph as an attribute"
    body = operator.attrgetter(str(holder.target))(gm)
    assert isinstance(body, fx.GraphModule)
    return body


def _inline(gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule, region: Region) -> None:
    holder: Any = node.args[0]
    arguments = iter(node.args[1:])
    values: dict[fx.Node, Any] = {}
    with gm.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = next(arguments)
            elif inner.op == "output":
                results = fx.map_arg(inner.args[0], values.__getitem__)
            elif inner.op == "get_attr":
                name = f"{holder.target}_{inner.target}".replace(".", "_")
                setattr(gm, name, operator.attrgetter(str(inner.target))(body))
                values[inner] = gm.graph.get_attr(name)
                values[inner].meta.update(inner.meta)
            else:
                values[inner] = gm.graph.node_copy(inner, values.__getitem__)
                values[inner].meta[_MARK] = region
    for reader in list(node.users):
        assert reader.target is operator.getitem, "a region's results are read one by one"
        result = results[reader.args[1]]  # type: ignore[index]
        reader.replace_all_uses_with(result)
        gm.graph.erase_node(reader)
    gm.graph.erase_node(node)
    if not holder.users:
        gm.graph.erase_node(holder)
