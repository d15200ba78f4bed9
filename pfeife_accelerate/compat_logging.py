"""What Dynamo logs and nobody can act on.

Models: torch 2.10 - 2.14. Filters, not levels: setting a level empties the caches of all loggers there are, which takes
milliseconds. Ignores: everything else that it logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["quiet_dynamo"]

#: A logger's name, and the least level that is heard. The first warns of each `.item()` in the model's Python, which
#: reads the value from us; the second, in torch 2.11, of a set of functions among the options, which it cannot log.
_HEARD = {"variables.tensor": logging.ERROR, "metrics_context": logging.CRITICAL}


@contextmanager
def quiet_dynamo() -> Iterator[None]:
    """These messages are not logged meanwhile."""
    with ExitStack() as stack:
        for name, level in _HEARD.items():
            logger = logging.getLogger(f"torch._dynamo.{name}")

            def is_heard(record: logging.LogRecord, level: int = level) -> bool:
                return record.levelno >= level

            logger.addFilter(is_heard)
            stack.callback(logger.removeFilter, is_heard)
        yield
