"""Seeds derived from a seed and indices."""

from __future__ import annotations

import pytest

from pfeife_accelerate.ir.seeds import derived_seed

pytestmark = pytest.mark.pure


def test_derived_seeds_are_what_they_were():
    """Runs are resumed by other versions of the package."""
    assert derived_seed(0) == 4761921975702974394
    assert derived_seed(1, 2, 3) == 8149998584550362645
    assert len({derived_seed(0, m, n) for m in range(50) for n in range(50)}) == 2500
