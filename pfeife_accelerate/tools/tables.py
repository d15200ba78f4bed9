"""Tables that show everything also on a narrow terminal: what does not fit goes on in the next line.

Models: one kind of column, all aligned alike. Ignores: what the tables are of.
"""

from __future__ import annotations

from rich.console import JustifyMethod
from rich.table import Column, Table

__all__ = ["folding_table", "number_table"]


def folding_table(*headings: str, title: str, justify: JustifyMethod = "left") -> Table:
    """A table without rows, of texts."""
    return Table(*(Column(heading, overflow="fold", justify=justify) for heading in headings), title=title)


def number_table(*headings: str, title: str) -> Table:
    """A table without rows, of numbers."""
    return folding_table(*headings, title=title, justify="right")
