"""What one partial sum per rank may be off by."""

from __future__ import annotations

import secrets
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo_numerics import partial_sums_bound

T, K, N, RANKS = 60, 6, 40, 3


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_partial_sums_are_within_the_bound_and_a_fault_is_not(dtype: Any) -> None:
    """Rows of every magnitude that cancel, choices that go nowhere among them; a rank's sum that is left out shows."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((T, K, N)) * np.exp2(rng.integers(-4, 5, (T, K, 1)))).astype(dtype)
    rows[:, 1] = -rows[:, 0]
    ranks = rng.integers(-1, RANKS, (T, K))
    parts = np.zeros((RANKS, T, N), dtype)
    for rank in range(RANKS):
        total = np.zeros((T, N), np.float32)
        for choice in range(K):
            total += np.where((ranks[:, choice] == rank)[:, None], rows[:, choice].astype(np.float32), np.float32(0))
        parts[rank] = total.astype(dtype)
    home = np.zeros((T, N), np.float32)
    for part in parts:
        home += part.astype(np.float32)
    exact = np.where((ranks >= 0)[:, :, None], rows.astype(np.float64), 0).sum(1)
    error = np.abs(home.astype(dtype).astype(np.float64) - exact)
    bound = partial_sums_bound(rows, ranks)
    assert (error <= bound).all()
    assert error.max() > 0
    short = (home - parts[0].astype(np.float32)).astype(dtype).astype(np.float64)
    # what is left out is off by as much as it counts, less what rounding may hide
    counts = np.abs(parts[0].astype(np.float64)) > 4 * bound
    assert counts.any()
    assert (np.abs(short - exact) > bound)[counts].all()
