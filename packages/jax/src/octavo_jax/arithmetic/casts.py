"""fp32 bit patterns to payload codes and back: E4M3 (fn), E5M2, E2M1; saturating, NaN coded 0x7F (E2M1: 0x7).

Sources: Micikevicius et al., arXiv 2209.05433 (FP8); OCP Microscaling Formats v1.0, section 5.3.3 (E2M1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo.formats import Format, ScaleFormat
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.elements import clip, elements, elementwise, maximum, minimum, plain, where


class _Fp8(NamedTuple):
    """fraction: fraction bits; bias: exponent bias; largest: code of the largest finite value."""

    fraction: int
    bias: int
    largest: int


_FP8: dict[Format, _Fp8] = {"e4m3": _Fp8(3, 7, 0x7E), "e5m2": _Fp8(2, 15, 0x7B)}

PAYLOAD_DTYPE: dict[Format, DTypeLike] = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.uint8}
SCALE_DTYPE: dict[ScaleFormat, DTypeLike] = {"fp32": jnp.float32, "e8m0": jnp.uint8, "e4m3": jnp.float8_e4m3fn}
"""What a payload of each format is stored in; E2M1 has one code per byte, in the low nibble."""

NAN_CODE: dict[Format, int] = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}

_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoint above the value of each E2M1 code 0 to 6; a tie goes to the even code."""

_E2M1_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.uint32)
"""Twice the magnitude of each E2M1 code."""


@elementwise
def nearest(magnitude: Array, to: Format) -> Array:
    """Code (uint32, sign left out) nearest to a magnitude, ties to even, saturating; not for NaN."""
    if to == "e2m1":
        code: Array = elements(jnp.zeros(magnitude.shape, jnp.uint32))
        for even, midpoint in enumerate(_E2M1_MIDPOINTS):
            limit = fp32.constant(midpoint)
            code = code + (magnitude > limit if even % 2 == 0 else magnitude >= limit).astype(jnp.uint32)
        return code
    fraction, bias, top = _FP8[to]
    drop = 23 - fraction
    half = np.uint32((1 << (drop - 1)) - 1)
    normal = ((magnitude + half + ((magnitude >> drop) & 1)) >> drop) - np.uint32((127 - bias) << fraction)
    # Below the smallest normal, adding 2^(1 - bias + drop) leaves one unit of the format as the sum's last place.
    anchor = np.float32(2.0 ** (1 - bias + drop))
    subnormal = fp32.as_bits(fp32.as_float(magnitude) + anchor) - fp32.constant(float(anchor))
    code = where(magnitude < fp32.constant(2.0 ** (1 - bias)), subnormal, normal)
    return where(magnitude >= fp32.INFINITY, np.uint32(top), minimum(code, np.uint32(top)))


@elementwise
def stochastic(magnitude: Array, random: Array) -> Array:
    """E2M1 code of min(magnitude, 6), rounded up with the probability of its distance; `random` holds 16 bits."""
    value = fp32.as_float(minimum(magnitude, fp32.constant(6.0)))
    # Steps are 0.5 below 2, 1 below 4, 2 above: in units of step / 2^16 the integer part is the step's number.
    fine = (value * np.float32(2**17)).astype(jnp.int32).astype(jnp.uint32)
    below_two, below_four = fine < 2 << 17, fine < 4 << 17
    units = where(below_two, fine, where(below_four, fine >> 1, fine >> 2))
    first = where(below_two, np.uint32(0), where(below_four, np.uint32(2), np.uint32(4)))
    up = ((units & 0xFFFF) + random) >> 16
    return first + (units >> 16) + up


@elementwise
def stored(code: Array, of: Format) -> Array:
    """uint32 codes as the payload's dtype."""
    code = code.astype(jnp.uint8)
    return code if of == "e2m1" else code.view(PAYLOAD_DTYPE[of])


@elementwise
def codes(payload: Array) -> Array:
    """The codes (uint32) in a payload or in E4M3 scales."""
    raw = payload if payload.dtype == jnp.uint8 else payload.view(jnp.uint8)
    return raw.astype(jnp.uint32)


def sign_shift(of: Format) -> int:
    """The bit that holds a code's sign."""
    return 3 if of == "e2m1" else 7


@elementwise
def parts(code: Array, of: Format) -> tuple[Array, Array, Array]:
    """(m, e, special) of codes without sign: the value is m * 2^e, m < 16; special: NaN or infinity."""
    if of == "e2m1":
        twice = jnp.asarray(_E2M1_TWICE)[plain(code)]
        return elements(twice), elements(jnp.full(code.shape, -1, jnp.int32)), elements(jnp.zeros(code.shape, bool))
    fraction, bias, top = _FP8[of]
    exponent, low = code >> fraction, code & ((1 << fraction) - 1)
    significand = where(exponent == 0, low, low | (1 << fraction))
    power = maximum(exponent, 1).astype(jnp.int32) - (bias + fraction)
    return significand, power, code > top


@elementwise
def times(code: Array, of: Format, scale: Array) -> Array:
    """fp32 bits of fl(value of code * scale), sign included; every NaN is 0x7FC00000.

    code    with sign, uint32
    scale   magnitude bits of a decode scale, or NaN; broadcasts against code
    """
    shift = sign_shift(of)
    significand, power, special = parts(code & ((1 << shift) - 1), of)
    m, e = fp32.split(scale)
    exponent = power + e
    product = fp32.as_bits(significand.astype(jnp.float32) * m)
    biased = (product >> 23).astype(jnp.int32) + exponent
    normal = (biased.astype(jnp.uint32) << 23) | (product & fp32.FRACTION)
    # A subnormal result is rounded once, from the exact 28-bit product, in units of 2^-149.
    whole = significand * ((fp32.as_bits(m) & fp32.FRACTION) | fp32.SMALLEST_NORMAL)
    down = clip(-126 - exponent, 1, 31).astype(jnp.uint32)
    shifted, rest = whole >> down, whole & ((np.uint32(1) << down) - 1)
    half = np.uint32(1) << (down - 1)
    tiny = shifted + ((rest > half) | ((rest == half) & (shifted & 1 == 1))).astype(jnp.uint32)
    tiny = where(exponent < -126 - 31, np.uint32(0), tiny)
    result = where(biased >= 255, fp32.INFINITY, where(biased <= 0, tiny, normal))
    zero = significand == 0
    result = where(zero, np.uint32(0), result)
    result = where(~zero & (scale == fp32.INFINITY), fp32.INFINITY, result)
    invalid = special | (scale > fp32.INFINITY) | (zero & (scale == fp32.INFINITY))
    return where(invalid, fp32.NAN, result | ((code >> shift) << 31))
