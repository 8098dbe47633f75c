"""Rows that a MoE layer keeps as codes: 1x128 blocks of E4M3 with a power of two as scale
(`octavo.quantizer.KEPT_ROWS`), as DeepSeek-V3 keeps activations (arXiv 2412.19437, section 3.3.3).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.quantizer import KEPT_ROWS
from octavo_numerics.dequantize import dequantize
from octavo_numerics.quantize import quantize

_BLOCK = 128
_RELATIVE = 2.0**-4  # half a step of E4M3, relative to its normal values
_SUBNORMAL = 2.0**-10  # half a step of its subnormal ones
_LEAST_DECODED = 2.0**-127  # a block's decode scale: the encode scale is 2^127 at most


def keep_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """`rows` [M, N] as backward reads them: quantized, dequantized, and rounded once to their own dtype.

    In fp16 a value that would decode to more than its largest finite one is that. A block with a value that is not
    finite comes back as NaN.
    """
    values = dequantize(quantize(rows, KEPT_ROWS))
    if rows.dtype == np.float16:
        largest = np.float32(np.finfo(np.float16).max)
        values = np.clip(values, -largest, largest)
    with np.errstate(over="ignore"):
        return values.astype(rows.dtype)


def kept_rows_bound(rows: NDArray[Any]) -> NDArray[np.float64]:
    """What |keep_rows(rows) - rows| is at most, for each element of rows [M, N] below 0.94 of the dtype's largest.

    The scale s of a block is a power of two above 224 / amax and at most 448 / amax. An error is
    half a step of E4M3, 2^-4 |x| in its normal range and 2^-10 / s below it, and half a step of the dtype's subnormals.
    """
    wide = np.abs(rows.astype(np.float64))
    blocks = range(0, rows.shape[1], _BLOCK)
    amax = np.concatenate([np.broadcast_to(part.max(1, keepdims=True), part.shape) for part in _parts(wide, blocks)], 1)
    step = _SUBNORMAL * np.maximum(amax / 224, _LEAST_DECODED)
    smallest = float(_finfo(rows.dtype).smallest_subnormal)
    bound: NDArray[np.float64] = np.maximum(_RELATIVE * wide, step) + smallest / 2
    return bound


def _finfo(dtype: np.dtype[Any]) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def _parts(rows: NDArray[np.float64], blocks: range) -> list[NDArray[np.float64]]:
    return [rows[:, start : start + _BLOCK] for start in blocks]
