"""What the script can still read: the records of the deferred tensors that exist.

Models: tensors, wherever they are kept (variables, lists, objects). Ignores: who made them, and when they will be read.
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakSet

from pfeife_accelerate.capture.records import PipelinedCall, Record, records_in

__all__ = ["Handle", "readable_values"]


class Handle:
    """A deferred tensor's hold on its record. It lives as long as the tensor, also when `swap_tensors` moves it to
    another one, which a weak reference to the tensor would not allow.
    """

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        _HANDLES.add(self)


_HANDLES: WeakSet[Handle] = WeakSet()


def readable_values(call: PipelinedCall, known: Collection[Record]) -> frozenset[str]:
    """The call's values that deferred tensors lead to, but for what leads there through `known` ones alone."""
    seen = {id(record) for record in known}
    pending = [handle.record for handle in list(_HANDLES)]
    found: set[str] = set()
    while pending:
        record = pending.pop()
        if id(record) in seen or record.value is not None or all(other is not call for other in record.calls):
            continue
        seen.add(id(record))
        if record.leaf is not None:
            found.add(record.leaf.value)
        elif record.operation is not None:
            pending += records_in((record.operation.args, record.operation.kwargs))
    return frozenset(found)
