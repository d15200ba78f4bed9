"""Numbers of bytes as people write them."""

from __future__ import annotations

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("42949672960", 42949672960), ("40GB", 40 * 10**9), ("38GiB", 38 * 2**30), ("38gib", 38 * 2**30),
        ("1.5 kB", 1500), ("1_000b", 1000), ("2T", 2 * 10**12), (" 3 MiB ", 3 * 2**20),
        ("8e10", 8 * 10**10), ("1.5e+1GB", 15 * 10**9),
    ],
)  # fmt: skip
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "40 gigs", "-3GB", "0", "1,5GB", "4GBit", "inf", "0.1", "1e-3", "1e99GB", "0.0GB"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(PfeifeError, match=r"PF138 .* is not a number of bytes") as failure:
        parse_bytes(text)
    assert "38GiB" in failure.value.hints[0]


def test_sizes_are_written():
    assert [format_bytes(n) for n in (0, 1023, 2048, 5 * 10**6, 40 * 2**30, 2000 * 2**30)] == [
        "0 B", "1023 B", "2.0 KiB", "4.8 MiB", "40.0 GiB", "2000 GiB",
    ]  # fmt: skip
