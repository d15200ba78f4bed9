"""Seeds derived from a seed and indices: equal on every rank, machine and version, unrelated for other indices.

Models: what a random operation of one micro-batch draws, whatever the number of stages and their order.
Ignores: generators; whoever draws seeds one with what is derived here.
"""

from __future__ import annotations

import hashlib

__all__ = ["derived_seed"]


def derived_seed(seed: int, *indices: int) -> int:
    """A seed of 63 bits."""
    text = ",".join(map(str, (seed, *indices)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
