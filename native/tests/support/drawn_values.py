"""Values to quantize, of every kind that a quantizer may meet."""

from __future__ import annotations

import numpy as np
import torch
from problems import DTYPES
from torch import Tensor


def drawn_values(rng: np.random.Generator, rows: int, cols: int, dtype: str, kind: str) -> Tensor:
    """[rows, cols] of one kind, "normal", "every bit", "wide", "sparse", "subnormal", "huge" or "not finite".

    NaN and infinities stand in few rows, so that other groups stay finite.
    """
    x = rng.standard_normal((rows, cols))
    if kind == "wide":
        x *= np.exp2(rng.uniform(-40, 15, (rows, cols)))
    elif kind == "sparse":
        x *= rng.random((rows, cols)) < 0.03
    elif kind == "subnormal":
        x *= 1e-6 if dtype == "float16" else 1e-38
    elif kind == "huge":
        x *= 2e4 if dtype == "float16" else 1e38
    made = torch.from_numpy(x).to(DTYPES[dtype])
    if kind == "every bit":
        bits = np.int32 if dtype == "float32" else np.int16
        limits = np.iinfo(bits)
        drawn = rng.integers(limits.min, limits.max, (rows, cols), dtype=bits, endpoint=True)
        made = torch.from_numpy(drawn).view(DTYPES[dtype])
        made = torch.where(made.isfinite(), made, 0)
    if kind == "not finite":
        for row in rng.integers(0, max(rows, 1), min(rows, 2)):
            made[row, int(rng.integers(cols))] = float(rng.choice([np.nan, np.inf, -np.inf]))
    return made
