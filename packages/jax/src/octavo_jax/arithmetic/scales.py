"""Scales from amax: fp32, E8M0 (MX) and NVFP4's two levels. `docs/numerics` states each rule.

An amax is magnitude bits (uint32); infinity or NaN poisons: its scales are NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import QuantizerSpec
from octavo.formats import FORMAT_MAX, Format
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic import casts
from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arithmetic.elements import elementwise, maximum, minimum, plain, where


class Scales(NamedTuple):
    """Of one plane, one entry per scaling unit.

    encode   fp32 bits of the factor that elements are multiplied with, NaN where the unit is poisoned
    stored   decode scales as they are stored: float32, uint8 (E8M0) or float8_e4m3fn
    """

    encode: Array
    stored: Array


def _settled(encode: Array, stored: Array) -> Scales:
    """Scales behind a barrier: XLA would else compute a unit's scale again for each of its elements."""
    return Scales(*barrier(plain(encode), plain(stored)))


@elementwise
def _decode(encode: Array) -> Array:
    """The stored fp32 decode scale fl(1 / encode)."""
    decode = fp32.divide(fp32.ONE, encode)
    return fp32.as_float(where(encode > fp32.INFINITY, fp32.NAN, decode))


@elementwise
def from_amax(amax: Array, spec: QuantizerSpec) -> Scales:
    """fp32 scales: s = fl(max / max(amax, eps)), at most FLT_MAX, a power of two where the spec says so."""
    with np.errstate(over="ignore"):
        epsilon = fp32.constant(spec.amax_epsilon)
    floored = maximum(amax, epsilon)
    top, finite = fp32.constant(FORMAT_MAX[spec.format]), fp32.is_finite(amax)
    if spec.power_of_two:
        encode = where(floored == 0, fp32.ONE, fp32.power_of_two_below_quotient(top, floored))
        decode = fp32.reciprocal_of_power(encode)
        return _settled(where(finite, encode, fp32.NAN), fp32.as_float(where(finite, decode, fp32.NAN)))
    encode = minimum(fp32.divide(top, floored), fp32.LARGEST)
    encode = where(floored == 0, fp32.ONE, encode)
    encode = where(finite, encode, fp32.NAN)
    return _settled(encode, _decode(encode))


@elementwise
def from_history(scale: Array) -> Scales:
    """Delayed scaling, whose encode scales come from the history."""
    encode = fp32.as_bits(scale.astype(jnp.float32))
    return _settled(encode, _decode(encode))


@elementwise
def e8m0(amax: Array, fmt: Format) -> Scales:
    """The smallest b with 2^(b - 127) >= fl(amax * fl(1 / max)); a zero block has b = 0, a poisoned one 0xFF.

    That is ceil(log2(amax / max)) + 127, an integer difference of bits, at all but one amax: the product of the first
    past max * 2^-127 is subnormal and rounds down to 2^-127.
    """
    top = np.int32(fp32.constant(FORMAT_MAX[fmt]))
    last_of_zero = np.uint32(top - (127 << 23) + 1)
    above = (amax.astype(jnp.int32) - (top - np.int32(fp32.FRACTION))) >> 23
    byte = where(amax <= last_of_zero, np.uint32(0), (above + 127).astype(jnp.uint32))
    finite = fp32.is_finite(amax)
    encode = where(finite, (254 - byte) << 23, fp32.NAN)
    return _settled(encode, where(finite, byte, np.uint32(0xFF)).astype(jnp.uint8))


@elementwise
def mxfp4(amax: Array) -> Scales:
    """`e8m0` of E2M1 with a byte of at most 252: 6 * 2^125 is fp32's last value of E2M1."""
    encode, byte = e8m0(amax, "e2m1")
    capped = where(byte == 0xFF, byte, minimum(byte, np.uint8(252)))
    return Scales(maximum(encode, fp32.constant(2.0**-125)), capped)


@elementwise
def e8m0_bits(byte: Array) -> Array:
    """fp32 bits of 2^(byte - 127), NaN for 0xFF."""
    byte = byte.astype(jnp.uint32)
    bits = where(byte == 0, np.uint32(0x00400000), byte << 23)
    return where(byte == 0xFF, fp32.NAN, bits)


@elementwise
def second_level(amax: Array) -> Scales:
    """NVFP4's second level: the group's encode scale S and the stored decode factor fl(1 / S)."""
    encode = minimum(fp32.divide(fp32.constant(2688.0), amax), fp32.LARGEST)
    encode = where(amax == 0, fp32.ONE, encode)
    encode = where(fp32.is_finite(amax), encode, fp32.NAN)
    return _settled(encode, _decode(encode))


@elementwise
def nvfp4(amax: Array, group_encode: Array, group_decode: Array) -> Scales:
    """Block scales under the group's S: d = e4m3(amax * S / 6), encode = 1 / (d / S).

    group_encode, group_decode   bits of S and of fl(1 / S), which broadcast against amax
    """
    sixth = fp32.constant(float(np.float32(1) / np.float32(6)))
    poisoned = group_encode > fp32.INFINITY
    # S is 2688 / FLT_MAX or more, so S / 6 is normal, and E4M3 sees no subnormal of its product with amax.
    exact = fp32.scaled(amax, fp32.scaled(group_encode, sixth))
    code = casts.nearest(minimum(exact, fp32.LARGEST), "e4m3")
    decode = casts.times(code, "e4m3", group_decode)
    encode = minimum(fp32.divide(fp32.ONE, decode), fp32.LARGEST)
    encode = where(poisoned, fp32.NAN, encode)
    code = where(poisoned, np.uint32(casts.NAN_CODE["e4m3"]), code)
    return _settled(encode, casts.stored(jnp.broadcast_to(plain(code), encode.shape), "e4m3"))
