"""What the tests of modules share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    """32 rows of 16 features, the last 7 of which, a tail, are NaN."""
    rows = rng.standard_normal((32, 16)).astype(np.float32)
    rows[25:] = np.nan
    return jnp.asarray(rows)
