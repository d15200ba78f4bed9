"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

from pfeife_accelerate.errors import PfeifeError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_MOST = 10**18
_TEXT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """`40GB` (powers of 1000), `38GiB` (powers of 1024) or a plain number of bytes.

    Raises: PfeifeError PF138 for anything else, and for no bytes at all.
    """
    found = _TEXT.fullmatch(text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    num_bytes = int(float(found.group(1).replace("_", "")) * unit) if found and unit else 0
    if not 0 < num_bytes <= _MOST:
        raise PfeifeError(
            id="PF138",
            what=f"{text!r} is not a number of bytes",
            hints=("40GB (powers of 1000), 38GiB (powers of 1024), or plain bytes: 42949672960",),
        )
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Three figures or so, in the unit that suits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{num_bytes:.0f} B"
