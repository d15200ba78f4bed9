"""What all tests share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Unbuffered, `print("a", "b")` is several writes, and ranks that share a pipe write into each other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)

# No test may read or change what the person at this computer has.
_CACHE = tempfile.TemporaryDirectory(prefix="pfeife-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is imported only if such a test was collected.

    Tests with several processes never run side by side; those of one file share a worker, as they share fixtures.
    """
    for item in items:
        is_several = (Path(__file__).parent / "gloo") in item.path.parents
        item.add_marker(pytest.mark.xdist_group("gloo" if is_several else item.path.stem))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
