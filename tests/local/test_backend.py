"""The Dynamo backend that anybody can name: `torch.compile(model, backend="pfeife")`."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.local


def test_the_registered_backend_computes_what_the_model_computes():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.randn(3, 4)
    assert "pfeife" in torch.compiler.list_backends()
    compiled = torch.compile(model, backend="pfeife")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
