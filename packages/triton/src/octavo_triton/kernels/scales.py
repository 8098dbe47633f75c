"""Encode and decode scales from amax, by the rules of the definition (docs/numerics).

amax is the int32 pattern of |x|: patterns order as magnitudes do, NaN above infinity above the finite ones, so that an
integer maximum finds amax and what is not finite at once.
"""

from __future__ import annotations

import triton.language as tl

from octavo_triton.kernels.device import COMPILED, device_function
from octavo_triton.kernels.formats import bits_of, float_from, fp8_codes, from_code


@device_function
def is_poisoned(amax):
    """True where a unit holds an infinity or a NaN."""
    return amax >= 0x7F800000


@device_function
def poisoned(encode, amax):
    """Encode scales, NaN where the unit holds what is not finite: then each of its codes becomes NaN's."""
    return float_from(tl.where(is_poisoned(amax), 0x7FC00000, bits_of(encode)))


@device_function
def at_most_finite(value):
    """min(value, FLT_MAX) of values that are not negative."""
    return float_from(tl.minimum(bits_of(value), 0x7F7FFFFF))


@device_function
def reciprocal(value):
    """fl(1 / value)."""
    # division as `/` is an approximation on GPUs
    if COMPILED:
        # half the instructions of a division
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [value], tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)


@device_function
def decode_of(encode, poisoned, POWER_OF_TWO: tl.constexpr = False):
    """fl(1 / encode), the one NaN where `poisoned`; POWER_OF_TWO: of a power of two."""
    # of 2^127 it is the subnormal with half the mantissa set
    inverse = tl.maximum((254 << 23) - bits_of(encode), 0x400000) if POWER_OF_TWO else bits_of(reciprocal(encode))
    return float_from(tl.where(poisoned, 0x7FC00000, inverse))


@device_function
def fp32_encode(amax, epsilon, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Encode scales of units with this amax; `epsilon` is the pattern of its lower bound."""
    floored = tl.maximum(amax, epsilon)
    if POWER_OF_TWO:
        # the largest value is 1.75 * 2^TOP, so the quotient's exponent is TOP less amax's, and one less where amax has
        # a significand above 1.75, which the sum carries into the exponent; 2^127 at most
        TOP: tl.constexpr = (8 if FORMAT == "e4m3" else 15) << 23
        below = tl.maximum(((floored + 0x1FFFFF) & 0x7F800000) - TOP, 0)
        scale = float_from((254 << 23) - below)
    else:
        LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
        scale = at_most_finite(tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), float_from(floored)))
    return tl.where(floored == 0, 1.0, scale)


@device_function
def e8m0_byte(amax, FORMAT: tl.constexpr):
    """The exponent byte b of finite units: the smallest with 2^(b - 127) >= fl(amax * fl(1 / max)); 0 for poisoned."""
    INVERSE: tl.constexpr = 0x3B124925 if FORMAT == "e4m3" else 0x37924925
    ratio = bits_of(float_from(amax) * float_from(tl.full([], INVERSE, tl.int32)))
    exponent = ratio >> 23
    mantissa = ratio & 0x7FFFFF
    # byte 0 stands for 2^-127, which is the subnormal with half the mantissa set
    above = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0).to(tl.int32)
    return tl.where(is_poisoned(amax), 0, exponent + above)


@device_function
def block_scales(amax, epsilon, FORMAT: tl.constexpr, SCALES: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(encode, stored decode) of blocks of one level: fp32 scales, or E8M0 as int32 bytes."""
    if SCALES == "e8m0":
        byte = e8m0_byte(amax, FORMAT)
        return float_from((254 - byte) << 23), tl.where(is_poisoned(amax), 0xFF, byte)
    else:
        encode = fp32_encode(amax, epsilon, FORMAT, POWER_OF_TWO)
        return encode, decode_of(encode, is_poisoned(amax), POWER_OF_TWO)


@device_function
def nvfp4_global(amax):
    """(S, fl(1 / S)) of groups with this amax, as if it were 0 where they are poisoned."""
    finite = tl.where(is_poisoned(amax), 0, amax)
    scale = at_most_finite(tl.div_rn(tl.full(amax.shape, 2688.0, tl.float32), float_from(finite)))
    scale = tl.where(finite == 0, 1.0, scale)
    return scale, reciprocal(scale)


@device_function
def nvfp4_scales(amax, group_amax, CAST: tl.constexpr):
    """(encode, decode as an E4M3 code, second-level decode factor) of blocks, broadcast over their groups' amax."""
    poisoned = is_poisoned(group_amax)
    scale, factor = nvfp4_global(group_amax)
    sixth = float_from(tl.full([], 0x3E2AAAAB, tl.int32))  # fl(1 / 6)
    finite = float_from(tl.where(poisoned, 0, amax))
    code = fp8_codes(at_most_finite(finite * (scale * sixth)), "e4m3", CAST).to(tl.int32)
    encode = at_most_finite(reciprocal(from_code(code, "e4m3") * factor))
    return encode, tl.where(poisoned, 0x7F, code), float_from(tl.where(poisoned, 0x7FC00000, bits_of(factor)))
