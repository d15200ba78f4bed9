"""What all tests share."""

from __future__ import annotations

import os
import tempfile

import pytest

# Unbuffered, `print("a", "b")` is several writes, and ranks that share a pipe write into each other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)

# No test may read or change what the person at this computer has.
_CACHE = tempfile.TemporaryDirectory(prefix="pfeife-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is imported only if such a test was collected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
