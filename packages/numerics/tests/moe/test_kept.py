"""Rows kept as codes: within the bound, exact where E4M3 is, and overflow is not hidden."""

from __future__ import annotations

import secrets
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo_numerics import keep_rows, kept_rows_bound


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_error_is_within_the_bound(dtype: Any) -> None:
    """Rows of every magnitude, subnormal ones and fp16's largest among them, with a partial last block."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    info = ml_dtypes.finfo(dtype)
    largest = 0.93 * float(info.max)  # above 0.94 of the dtype's, E4M3 may round a value past it
    low, high = np.log2(float(info.smallest_subnormal)), np.log2(largest)
    exponents = rng.uniform(low, high, (40, 1)) - rng.exponential(4, (40, 300))
    rows = (np.exp2(exponents) * rng.choice([-1, 1], (40, 300))).astype(dtype)
    rows[0], rows[1, :128] = 0, largest
    error = np.abs(keep_rows(rows).astype(np.float64) - rows.astype(np.float64))
    assert keep_rows(rows).dtype == rows.dtype
    assert (error <= kept_rows_bound(rows)).all()
    assert error.max() > 0


def test_what_is_kept_is_kept_again() -> None:
    """Codes of what codes stand for are the same; a block of NaN or infinity is NaN, and its neighbours are not."""
    rows = np.random.default_rng(secrets.randbits(32)).standard_normal((8, 256)).astype(ml_dtypes.bfloat16)
    once = keep_rows(rows)
    assert (keep_rows(once) == once).all()
    rows[2, 5], rows[3, 200] = np.inf, np.nan
    kept = keep_rows(rows).astype(np.float32)
    assert np.isnan(kept[2, :128]).all()
    assert np.isnan(kept[3, 128:]).all()
    assert np.isnan(kept).sum() == 256
