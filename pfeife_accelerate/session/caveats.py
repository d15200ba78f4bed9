"""What a person should know about how their model is pipelined: said once, by one rank."""

from __future__ import annotations

from pfeife_accelerate.log import get_logger, warn_once
from pfeife_accelerate.session.call import Call

_LOG = get_logger(__name__)


def tell(call: Call, *, training: bool) -> None:
    """Warn of whatever makes this call differ from what the script would expect of one process."""
    graph = call.graph
    if graph.refusal is not None and call.batch_size > 1:
        warn_once(
            _LOG,
            f"whole batch {graph.refusal}",
            f"the batch is not divided into micro-batches: {graph.refusal}. Stages run one after the other. If another "
            "dimension is the batch, say so by the option batch_dims.",
        )
    if training and graph.has_batch_statistics:
        warn_once(
            _LOG,
            "batch norm",
            "BatchNorm in training mode normalises each micro-batch by its own statistics, as under gradient "
            "accumulation; gradients differ from the whole batch's. To be exact, put these layers into eval() or use "
            "GroupNorm.",
        )
    if training and graph.updated_buffers:
        names = ", ".join(graph.updated_buffers[:3])
        warn_once(
            _LOG,
            f"buffers {names}",
            f"the forward pass changes buffers ({names}): it does so once for each micro-batch, as under gradient "
            "accumulation, and not once for the whole batch.",
        )
