"""Scales from amax, exactly as docs/numerics defines them: no log2, no exp2, powers of two from exponent bits.

amax travels as the int32 bit pattern of |x|: patterns order as magnitudes do, NaN above Inf above finite, so one
integer maximum finds amax and tells whether the unit holds a value that is not finite.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from octavo.formats import FORMAT_MAX, Format
from octavo_torch.arithmetic.casts import FLT_MAX, INF_BITS, NAN_BITS, bits_of, float_from, from_codes, to_fp8

NVFP4_RANGE = 2688.0  # 448 * 6: E4M3 block scale times E2M1 value


def to_fp32(value: float) -> float:
    """A host float rounded once to fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """fl(numerator / denominator) in one rounding: torch's `scalar / tensor` is a reciprocal and a product."""
    return torch.div(torch.full_like(denominator, numerator), denominator)


def poisoned_by(amax_bits: Tensor) -> Tensor:
    """True where a unit holds an infinity or a NaN."""
    return amax_bits >= INF_BITS


def fp32_scales(amax_bits: Tensor, fmt: Format, epsilon: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Encode scale s = max / amax and stored decode scale fl(1 / s), NaN where the unit is poisoned."""
    amax = float_from(amax_bits).clamp(min=to_fp32(epsilon))
    scale = divide(FORMAT_MAX[fmt], amax).clamp_(max=FLT_MAX)
    if power_of_two:
        scale = float_from(bits_of(scale) & INF_BITS)
    scale = torch.where(amax == 0, 1.0, scale)
    return scale, decode_scale(scale, poisoned_by(amax_bits))


def decode_scale(scale: Tensor, poisoned: Tensor) -> Tensor:
    """fl(1 / scale), the canonical NaN where `poisoned`."""
    return float_from(torch.where(poisoned, NAN_BITS, bits_of(divide(1.0, scale))))


def e8m0_scales(amax_bits: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Encode scale 2^(127 - b) and the exponent byte b: the smallest with 2^(b - 127) >= fl(amax * fl(1 / max))."""
    ratio = bits_of(float_from(amax_bits) * to_fp32(1.0 / FORMAT_MAX[fmt]))
    exponent, mantissa = ratio >> 23, ratio & 0x7FFFFF
    # byte 0 stands for 2^-127, which is the subnormal with half the mantissa set
    byte = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0).to(torch.int32)
    poisoned = poisoned_by(amax_bits)
    byte = byte.masked_fill(poisoned, 0)
    encode = float_from((254 - byte) << 23)
    return encode, byte.masked_fill(poisoned, 0xFF).to(torch.uint8)


def mxfp4_scales(amax_bits: Tensor) -> tuple[Tensor, Tensor]:
    """`e8m0_scales` of E2M1 with a byte of at most 252: 6 * 2^125 is fp32's last value of E2M1."""
    encode, byte = e8m0_scales(amax_bits, "e2m1")
    return encode.clamp(min=2.0**-125), torch.where(byte == 0xFF, byte, byte.clamp(max=252))


def nvfp4_scales(amax_bits: Tensor, group_amax_bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode scale and E4M3 decode scale of each block, and the second-level decode factor.

    amax_bits         int32 of each block
    group_amax_bits   int32 of the block's group, broadcastable to `amax_bits`; the factor comes back in its shape
    """
    poisoned = poisoned_by(group_amax_bits)
    group_amax = float_from(group_amax_bits.masked_fill(poisoned, 0))
    first = divide(NVFP4_RANGE, group_amax).clamp_(max=FLT_MAX)
    first = torch.where(group_amax == 0, 1.0, first)
    factor = divide(1.0, first)
    amax = float_from(amax_bits.masked_fill(poisoned, 0))
    decode = to_fp8((amax * (first * to_fp32(1.0 / 6.0))).clamp_(max=FLT_MAX), "e4m3", poisoned)
    finite = decode.view(torch.uint8).masked_fill(poisoned, 0).view(torch.float8_e4m3fn)
    encode = divide(1.0, from_codes(finite) * factor).clamp_(max=FLT_MAX)
    return encode, decode, float_from(torch.where(poisoned, NAN_BITS, bits_of(factor)))
