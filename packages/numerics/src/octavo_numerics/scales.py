"""The three scale rules: from amax to encode and decode scales.

An amax is max |x| of a scaling unit in fp32, NaN winning, 0 for an empty unit. Where it is not finite the unit's
encode and decode scales are NaN, so that every code of the unit becomes the NaN code. Every operation is one IEEE
binary32 operation: no float64, no log2, no contraction.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.formats import FORMAT_MAX, Format
from octavo_numerics.casts import F32, U8, cast, decode

FLT_MAX = np.float32(np.finfo(np.float32).max)
CANONICAL_NAN = np.uint32(0x7FC00000).view(np.float32)
"""The NaN of every stored scale and of every dequantized value."""

E8M0_NAN = 0xFF
_LARGEST_MXFP4 = np.uint8(252)
"""6 * 2^125 is fp32's last value of E2M1: the next byte would make an infinity of 4."""

_EXPONENT_MASK = np.uint32(0xFF800000)
_MANTISSA_MASK = np.uint32(0x007FFFFF)
_ONE = np.float32(1)


def canonical(values: F32) -> F32:
    """`values` with every NaN replaced by 0x7FC00000, in place."""
    values[np.isnan(values)] = CANONICAL_NAN
    return values


def reciprocal(values: F32) -> F32:
    """fl(1 / value)."""
    return np.divide(_ONE, values, dtype=np.float32)


def epsilon_fp32(amax_epsilon: float) -> np.float32:
    """`amax_epsilon` rounded to fp32; ValueError where it has no finite fp32 value."""
    with np.errstate(over="ignore"):
        epsilon = np.float32(amax_epsilon)
    if not np.isfinite(epsilon):
        raise ValueError(f"amax_epsilon={amax_epsilon!r} is past fp32's largest value; give at most {FLT_MAX}")
    return epsilon


@np.errstate(all="ignore")
def fp32_scales(amax: F32, fmt: Format, *, amax_epsilon: float = 0.0, power_of_two: bool = False) -> tuple[F32, F32]:
    """(encode, decode) scales of units with these amaxes.

    s = fl(max / a) with a = max(amax, eps); Inf becomes FLT_MAX; a power of two keeps s's exponent alone; a = 0
    gives 1. decode = fl(1 / s).
    """
    floor = np.maximum(amax, epsilon_fp32(amax_epsilon))
    encode = np.minimum(np.float32(FORMAT_MAX[fmt]) / floor, FLT_MAX)
    if power_of_two:
        encode = (encode.view(np.uint32) & _EXPONENT_MASK).view(np.float32)
    encode = np.where(floor == 0, _ONE, encode)
    encode = np.where(np.isfinite(amax), encode, CANONICAL_NAN)
    return encode, reciprocal(encode)


@np.errstate(all="ignore")
def e8m0_scales(amax: F32, fmt: Format) -> tuple[F32, U8]:
    """(encode scales, exponent bytes b) of MX blocks with these amaxes.

    b is the smallest byte with 2^(b-127) >= fl(amax * fl(1 / max)), so that a block does not saturate
    (Mishra et al., arXiv 2506.08027, section 3); encode = 2^(127-b), built from exponent bits.
    """
    target = (amax * (_ONE / np.float32(FORMAT_MAX[fmt]))).view(np.uint32)
    exponent, mantissa = target >> np.uint32(23), target & _MANTISSA_MASK
    # Byte 0 stands for the subnormal 2^-127, whose mantissa is 0x400000; bytes above it for normal numbers.
    step = np.where(exponent == 0, np.uint32(0x400000), np.uint32(0))
    byte = exponent + (mantissa > step)
    encode = ((np.uint32(254) - byte) << np.uint32(23)).view(np.float32)
    finite = np.isfinite(amax)
    return np.where(finite, encode, CANONICAL_NAN), np.where(finite, byte, E8M0_NAN).astype(np.uint8)


def mxfp4_scales(amax: F32) -> tuple[F32, U8]:
    """(encode scales, exponent bytes) of MXFP4 blocks with these amaxes: `e8m0_scales` of E2M1, at most 252."""
    encode, byte = e8m0_scales(amax, "e2m1")
    capped = np.where(byte == E8M0_NAN, byte, np.minimum(byte, _LARGEST_MXFP4))
    return np.maximum(encode, np.float32(2.0**-125)), capped


def e8m0_decode(byte: U8) -> F32:
    """2^(byte - 127) in fp32, NaN for 0xFF."""
    bits = byte.astype(np.uint32) << np.uint32(23)
    bits = np.where(byte == 0, np.uint32(0x00400000), bits)
    return np.where(byte == E8M0_NAN, np.uint32(0x7FC00000), bits).view(np.float32)


@np.errstate(all="ignore")
def nvfp4_scales(block_amax: F32, group_amax: F32, group: npt.NDArray[np.int64]) -> tuple[F32, U8, F32]:
    """(encode scales, E4M3 codes of the decode scales, second-level decode factors) of NVFP4.

    block_amax [R, B], group_amax [G], and group [R], the group of each row of block_amax. The second level [G] is
    fl(1 / S); S, and with it every scale of the group, is NaN where group_amax is not finite.
    """
    second = np.minimum(np.float32(2688) / group_amax, FLT_MAX)
    second = np.where(group_amax == 0, _ONE, second)
    second = np.where(np.isfinite(group_amax), second, CANONICAL_NAN)
    factor = reciprocal(second)
    sixth = (second * (_ONE / np.float32(6)))[group][:, None]
    code = cast(np.minimum(block_amax * sixth, FLT_MAX), "e4m3")
    encode = np.minimum(_ONE / (decode(code, "e4m3") * factor[group][:, None]), FLT_MAX)
    return encode, code, factor
