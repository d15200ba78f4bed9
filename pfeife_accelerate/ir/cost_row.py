"""One object of a cost file: its entries by key, each refused by name where it is not what it must be.

Models: numbers within bounds, bytes (rounded up to whole ones), numbers of nodes, texts, lists of objects; an entry
that is null counts as missing. Ignores: what the keys mean; `cost_file` says that.
"""

from __future__ import annotations

import math
from typing import Any, Final

__all__ = ["MOST_BYTES", "CostRow", "WrongRow"]

MOST_BYTES: Final = 10**18
_SHOWN = 40  # characters of a wrong entry


class WrongRow(ValueError):
    """What is wrong with which entry."""


class CostRow:
    """A JSON object and where it stands in the file."""

    def __init__(self, data: object, where: str) -> None:
        """Refuse what is not an object."""
        if not isinstance(data, dict):
            raise WrongRow(f"{where or 'the file'} is {_shown(data)}, not an object")
        self._data: dict[str, Any] = data
        self.where = where

    def has(self, key: str) -> bool:
        """Whether there is an entry."""
        return self._data.get(key) is not None

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, most: float = MOST_BYTES) -> float:
        """A number from `least` to `most`."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or not least <= value <= most:
            raise self._wrong(key, f"a number from {least:g} to {most:g}")
        return value

    def bytes(self, key: str, default: float | None = None) -> int:
        """A number of bytes; a part of one counts whole."""
        return math.ceil(self.number(key, default))

    def index(self, key: str, end: int, default: int | None = None, *, least: int = 0) -> int:
        """A whole number from `least` to below `end`."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or not least <= value < end or value != int(value):
            raise self._wrong(key, f"a whole number from {least} to {end - 1}")
        return int(value)

    def label(self, key: str, default: int) -> float | str:
        """A number or a text, to tell things apart."""
        value = self._get(key, default)
        if not isinstance(value, (int, float, str)) or value != value:
            raise self._wrong(key, "a number or a text")
        return value

    def text(self, key: str, default: str) -> str:
        """A text for people."""
        return str(self._get(key, default))

    def row(self, key: str) -> CostRow:
        """An object in this one."""
        return CostRow(self._get(key, None), self._place(key))

    def rows(self, key: str) -> list[CostRow]:
        """A list of objects."""
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return [CostRow(entry, f"{self._place(key)}[{index}]") for index, entry in enumerate(value)]

    def _get(self, key: str, default: object) -> Any:
        value = self._data.get(key)
        if value is not None:
            return value
        if default is None:
            raise WrongRow(f"{self._place(key)} is missing")
        return default

    def _wrong(self, key: str, expected: str) -> WrongRow:
        return WrongRow(f"{self._place(key)} is {_shown(self._data[key])}, not {expected}")

    def _place(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        return "a huge number"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
