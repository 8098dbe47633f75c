"""fp32 to E4M3, E5M2, E2M1 and bfloat16, and back: round to nearest even, subnormals preserved, saturating.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1; OCP Microscaling Formats
specification v1.0, table 5 (E2M1). Saturation and NaN are Octavo's (docs/numerics): +-Inf and everything past the
largest finite value becomes that value with its sign, -0 stays -0, and a NaN of any sign or payload becomes 0x7F,
or 0x7 (+6) in E2M1, which has none.

A cast is one table look-up. All values at which a code changes (the midpoints between neighbours) have at most 5
significant bits, so they are bfloat16 values; the code is therefore constant on every open interval between bfloat16
neighbours, and depends on the upper half of the fp32 pattern and on whether the lower half is zero.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.formats import FORMAT_MAX, Format

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

NAN_CODE: dict[Format, int] = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}
"""The code of every NaN."""

PAYLOAD_DTYPE: dict[Format, np.dtype[Any]] = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e2m1": np.dtype(np.uint8),
}
"""dtype in which codes are stored: E2M1 as one code per byte, in the low nibble."""

_MANTISSA_BITS: dict[Format, int] = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
_MIN_EXPONENT: dict[Format, int] = {"e4m3": -6, "e5m2": -14, "e2m1": 0}
_SIGN_BIT: dict[Format, int] = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x8}


def _nearest_even(values: npt.NDArray[np.float64], fmt: Format) -> U8:
    """Codes of float64 `values` by the rule itself: scale to units of the last place, round, clip."""
    mantissa, least = _MANTISSA_BITS[fmt], _MIN_EXPONENT[fmt]
    magnitude = np.minimum(np.abs(values), FORMAT_MAX[fmt])
    exponent = np.maximum(np.where(magnitude == 0, least, np.frexp(magnitude)[1] - 1), least)
    codes = (exponent - least) * (1 << mantissa) + np.rint(np.ldexp(magnitude, mantissa - exponent))
    codes += np.where(np.signbit(values), _SIGN_BIT[fmt], 0)
    return np.where(np.isnan(values), NAN_CODE[fmt], codes).astype(np.uint8)


@cache
def _cast_table(fmt: Format) -> U8:
    """Code by (upper half of the fp32 pattern, lower half is not zero), 2^17 entries."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    patterns = np.stack([upper, upper | 0x8000], axis=1).reshape(-1)
    with np.errstate(all="ignore"):
        return _nearest_even(patterns.view(np.float32).astype(np.float64), fmt)


@cache
def _decode_table(fmt: Format) -> F32:
    """Value by code; codes of E2M1 past 0xF repeat, so that a stray high nibble is not an index error."""
    codes = np.arange(256, dtype=np.int64) % (256 if fmt != "e2m1" else 16)
    mantissa, sign = _MANTISSA_BITS[fmt], _SIGN_BIT[fmt]
    magnitude = codes % sign
    exponent = np.maximum(magnitude >> mantissa, 1)
    units = magnitude - ((exponent - 1) << mantissa)
    values = np.ldexp(units.astype(np.float64), exponent - 1 + _MIN_EXPONENT[fmt] - mantissa)
    if fmt == "e4m3":
        values[magnitude == 0x7F] = np.nan
    elif fmt == "e5m2":
        values[magnitude == 0x7C] = np.inf
        values[magnitude > 0x7C] = np.nan
    signed: F32 = np.where(codes >= sign, -values, values).astype(np.float32)
    return signed


def cast(values: F32, fmt: Format) -> U8:
    """Codes of fp32 `values`, any shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    index = bits >> np.uint32(15)
    index &= np.uint32(0x1FFFE)
    index |= (bits & np.uint32(0xFFFF)) != 0
    return _cast_table(fmt).take(index)


def decode(codes: npt.NDArray[Any], fmt: Format) -> F32:
    """fp32 values of codes, given as bytes or in the payload dtype."""
    return _decode_table(fmt).take(codes.view(np.uint8))


def round_bfloat16(values: F32) -> F32:
    """fp32 `values` rounded to bfloat16 (nearest even, subnormals preserved, overflow to Inf), as fp32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded &= np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), np.float32(np.nan), rounded.view(np.float32))
