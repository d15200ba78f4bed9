"""Tables on a narrow terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pfeife_accelerate.tools.tables import folding_table, number_table

pytestmark = pytest.mark.local


@pytest.mark.parametrize("make", [folding_table, number_table])
def test_a_long_name_goes_on_in_the_next_line(make):
    table = make("name", "what it is", title="All")
    name = "a" * 10 + "b" * 10 + "c" * 10
    table.add_row(name, "x" * 30)
    text = io.StringIO()
    Console(file=text, width=30).print(table)
    assert "…" not in text.getvalue()
    assert sum(map(text.getvalue().count, "abc")) >= 30
