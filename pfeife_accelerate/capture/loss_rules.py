"""How each ATen operation of a loss acts on the states of `loss_states`: the table of all rules.

A rule takes the builder and a traced whole-batch node and returns the micro-batch's node and its state, or raises
`Refused`. An operation without a rule is refused, so a rule is written only where cutting before the operation is
certain to give what cutting after it gives. `apply_rule` holds every rule's result against the traced shape.
"""

from __future__ import annotations

import torch
from torch import fx

from pfeife_accelerate.capture.loss_builder import LossBuilder, Result, Rule, emit_same, name, refusal
from pfeife_accelerate.capture.loss_criteria import CRITERION_RULES
from pfeife_accelerate.capture.loss_indexing import INDEXING_RULES
from pfeife_accelerate.capture.loss_layers import LAYER_RULES
from pfeife_accelerate.capture.loss_owned import joined, owned_operation, owner_of
from pfeife_accelerate.capture.loss_pointwise import POINTWISE_RULES, pointwise
from pfeife_accelerate.capture.loss_products import PRODUCT_RULES
from pfeife_accelerate.capture.loss_reductions import REDUCTION_RULES
from pfeife_accelerate.capture.loss_shapes import SHAPE_RULES
from pfeife_accelerate.capture.loss_states import REPLICATED, Refused, StateKind
from pfeife_accelerate.compat import OpOverload

RULES: dict[str, Rule] = {
    **POINTWISE_RULES,
    **REDUCTION_RULES,
    **SHAPE_RULES,
    **PRODUCT_RULES,
    **INDEXING_RULES,
    **LAYER_RULES,
    **CRITERION_RULES,
}


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the operation would give something else each time."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def apply_rule(b: LossBuilder, node: fx.Node) -> Result:
    """The micro-batch's node and state for a traced node.

    Raises: Refused if the operation has no rule, or its rule does not fit.
    """
    if name(node) == "getitem" and node.args[0] in b.pieces:  # the pieces' states are not alike
        return RULES["getitem"](b, node)
    operands = [n for n in node.all_input_nodes if not b.is_constant(n)]
    kinds = {b.state(n).kind for n in operands}
    if kinds == {StateKind.REPLICATED}:
        return emit_same(b, node, REPLICATED)
    owner = owner_of(b, node)
    if StateKind.OWNED not in kinds:
        try:
            return _by_table(b, node)
        except Refused:
            if owner is None:
                raise
    if owner is not None:
        return owned_operation(b, node, owner)
    if kinds == {StateKind.OWNED} and name(node) in ("stack.default", "cat.default"):
        return joined(b, node)
    with b.as_partial(operands):
        return _by_table(b, node)


def _by_table(b: LossBuilder, node: fx.Node) -> Result:
    rule = RULES.get(name(node))
    if rule is None and isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
        rule = pointwise
    if rule is None:
        raise refusal(node)
    micro, state = rule(b, node)
    value = node.meta.get("val")
    if state.is_split and isinstance(value, torch.Tensor) and not _carries(value, state.dim, state.extent):
        raise refusal(node)
    return micro, state


def _carries(value: torch.Tensor, dim: int, extent: int) -> bool:
    return 0 <= dim < value.dim() and value.shape[dim] == extent
