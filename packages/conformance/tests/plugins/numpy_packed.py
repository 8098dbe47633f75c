"""The numpy backend's codes of MXFP4 bytes: the values, by way of a table, and the definition's codes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_VALUES = np.array([sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


def of_mxfp4(
    fault: str | None, dtype: Any, run: Callable[..., Any], blocks: Any, scales: Any, only: Any = None, /
) -> Any:
    """Both planes, whichever is read; the fault takes the high nibble first."""
    nibbles = [blocks & 15, blocks >> 4]
    codes = np.stack(nibbles[::-1] if fault == "high-nibble-first" else nibbles, -1).reshape(*scales.shape, 32)
    values = _VALUES[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return run(values.reshape(*scales.shape[:2], -1).astype(dtype), None)
