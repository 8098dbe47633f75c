"""IEEE binary32 arithmetic on uint32 bit patterns: exact, subnormals included, whatever the device flushes.

Magnitudes only (the sign bit is handled by the callers). `scaled` is the cheap elementwise product for values that
are cast to eight bits or fewer afterwards; `multiply`, `divide` and `square_root` are complete.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic.elements import broadcast, clip, elements, elementwise, minimum, plain, where

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000)
LARGEST = np.uint32(0x7F7FFFFF)
ONE = np.uint32(0x3F800000)
SMALLEST_NORMAL = np.uint32(0x00800000)
FRACTION = np.uint32(0x007FFFFF)

_ZERO_EXPONENT = np.int32(-1000)
"""Exponent that stands for the value 0: no product or quotient brings it back into range."""


def constant(value: float) -> np.uint32:
    """The bits of fl(value)."""
    return np.float32(value).view(np.uint32)


@elementwise
def as_bits(x: Array) -> Array:
    """The bits of a float32 array."""
    return x.view(jnp.uint32)


@elementwise
def as_float(bits: Array) -> Array:
    """The float32 array with these bits."""
    return bits.view(jnp.float32)


@elementwise
def widened(x: Array) -> Array:
    """The fp32 bits of a bf16, fp16 or fp32 array: exact, subnormals of each type included."""
    if x.dtype == jnp.float32:
        return as_bits(x)
    if x.dtype == jnp.bfloat16:
        return x.view(jnp.uint16).astype(jnp.uint32) << 16
    if x.dtype != jnp.float16:
        raise ValueError(f"x has dtype {x.dtype}; a quantizer takes bfloat16, float16 or float32")
    half = x.view(jnp.uint16).astype(jnp.uint32)
    exponent, fraction = (half >> 10) & 31, half & 0x3FF
    subnormal = as_bits(fraction.astype(jnp.float32) * np.float32(2**-24))
    normal = (where(exponent == 31, np.uint32(255), exponent + 112) << 23) | (fraction << 13)
    return ((half >> 15) << 31) | where(exponent == 0, subnormal, normal)


@elementwise
def split(magnitude: Array | np.uint32) -> tuple[Any, Any]:
    """(m, e) with magnitude = m * 2^e: m float32 in [1, 2), e int32; zero gets an exponent that never returns.

    A number, which has to be normal, is split while the program is traced.
    """
    if isinstance(magnitude, np.uint32):
        return ((magnitude & FRACTION) | ONE).view(np.float32), np.int32(magnitude >> 23) - np.int32(127)
    subnormal = magnitude < SMALLEST_NORMAL
    counted = as_bits(magnitude.astype(jnp.int32).astype(jnp.float32))
    normal = where(subnormal, counted, magnitude)
    exponent = (normal >> 23).astype(jnp.int32) - where(subnormal, np.int32(127 + 149), np.int32(127))
    exponent = where(magnitude == 0, _ZERO_EXPONENT, exponent)
    return as_float((normal & FRACTION) | ONE), exponent


@elementwise
def join(significand: Array, exponent: Array) -> Array:
    """The bits of significand * 2^exponent for a normal significand; subnormal results become 0, large ones inf."""
    bits = as_bits(significand)
    biased = (bits >> 23).astype(jnp.int32) + exponent
    normal = (biased.astype(jnp.uint32) << 23) | (bits & FRACTION)
    return where(biased >= 255, INFINITY, where(biased <= 0, np.uint32(0), normal))


@elementwise
def scaled(magnitude: Array, scale: Array | np.uint32) -> Array:
    """The bits of fl(magnitude * scale) with subnormal results flushed to 0, as far as casts to 8 bits can see."""
    m, e = split(magnitude)
    n, f = split(scale)
    return join(m * n, e + f)


@elementwise
def scaled_by_power(magnitude: Array, scale: Array) -> Array:
    """`scaled` by a power of two of 2^-126 or more: the significand stays."""
    m, e = split(magnitude)
    return join(m, e + ((scale >> 23).astype(jnp.int32) - 127))


@elementwise
def power_of_two_below_quotient(dividend: np.uint32, divisor: Array) -> Array:
    """The bits of the largest power of two <= fl(dividend / divisor), and of 2^127 for greater ones.

    The quotient of a normal dividend by a smaller significand is below a power of two by 2^-24 of it at the least, and
    no rounding reaches that power; so the integer difference of the bits has the exponent, its borrow included.

    dividend   a normal number of at least 2, so that a subnormal divisor's quotient is past 2^127
    divisor    at most FLT_MAX
    """
    exponent = (np.int32(dividend) - divisor.astype(jnp.int32)) >> 23
    return minimum(exponent + 127, 254).astype(jnp.uint32) << 23


@elementwise
def reciprocal_of_power(power: Array) -> Array:
    """The bits of 1 / 2^k for the bits of a normal 2^k; 2^-127 is subnormal."""
    largest = np.uint32(254 << 23)
    return where(power == largest, np.uint32(0x00400000), largest - power)


@elementwise
def _integer(significand: Array | np.float32) -> Any:
    """The 24-bit integer m * 2^23 of a significand m in [1, 2)."""
    bits = significand.view(np.uint32)
    return (bits & FRACTION) | SMALLEST_NORMAL


@elementwise
def _rounded(q: Array, exponent: Array) -> Array:
    """The bits of q * 2^(exponent - 25) rounded to nearest even; q in [2^25, 2^26), its lowest bit sticky."""
    shift = clip(-126 - exponent, 0, 27).astype(jnp.uint32)
    lost = (q & ((np.uint32(1) << shift) - 1)) != 0
    q = (q >> shift) | lost.astype(jnp.uint32)
    truncated, rest = q >> 2, q & 3
    truncated = truncated + ((rest == 3) | ((rest == 2) & (truncated & 1 == 1))).astype(jnp.uint32)
    bits = (clip(exponent + 126, 0, 254).astype(jnp.uint32) << 23) + truncated
    return where((exponent > 127) | (bits > INFINITY), INFINITY, bits)


@elementwise
def multiply(a: Array, b: Array | np.uint32) -> Array:
    """The bits of fl(a * b) for finite magnitudes; a number b has to be normal."""
    (m, e), (n, f) = split(a), split(b)
    x, y = _integer(m), _integer(n)
    x1, x0, y1, y0 = x >> 12, x & 0xFFF, y >> 12, y & 0xFFF
    middle = x1 * y0 + x0 * y1
    low = ((middle & 0xFFF) << 12) + x0 * y0
    high = x1 * y1 + (middle >> 12) + (low >> 24)
    low = low & 0xFFFFFF
    # The product is high * 2^24 + low with high in [2^22, 2^24).
    carry = high >> 23 == 1
    q = where(carry, (high << 2) | (low >> 22), (high << 3) | (low >> 21))
    sticky = where(carry, low & 0x3FFFFF, low & 0x1FFFFF) != 0
    return _rounded(q | sticky.astype(jnp.uint32), e + f + carry.astype(jnp.int32))


@elementwise
def divide(a: Array | np.uint32, b: Array) -> Array:
    """The bits of fl(a / b) for a finite magnitude a > 0 and a finite magnitude b; a / 0 is inf; a number a has to be
    normal."""
    (m, e), (n, f) = split(a), split(b)
    x, y = _integer(m).astype(np.int32), _integer(n).astype(np.int32)
    if not isinstance(a, np.uint32):
        x, y = broadcast(x, y)
    less = x < y
    shift = where(less, np.int32(24), np.int32(23))
    guess = m / n * where(less, np.float32(2**24), np.float32(2**23))
    # The device's quotient is off by a few units at most; the remainder, exact modulo 2^32, says by how many.
    quotient = guess.astype(jnp.int32)
    remainder = (x << shift) - quotient * y
    for _ in range(3):
        step = (remainder >= y).astype(jnp.int32) - (remainder < 0).astype(jnp.int32)
        quotient, remainder = quotient + step, remainder - step * y
    doubled = remainder << 1
    guard = doubled >= y
    sticky = where(guard, doubled - y, doubled) != 0
    q = (quotient.astype(jnp.uint32) << 2) | (guard.astype(jnp.uint32) << 1) | sticky.astype(jnp.uint32)
    return _rounded(q, e - f - less.astype(jnp.int32))


@elementwise
def square_root(a: Array) -> Array:
    """The bits of fl(sqrt(a)) for a finite magnitude."""
    m, e = split(a)
    odd = e & 1
    guess = jnp.sqrt(plain(where(odd == 1, m + m, m))) * np.float32(2**23)
    # As in `divide`: the device's root is off by a few units at most, and the remainder is exact modulo 2^32.
    root = elements(guess).astype(jnp.int32)
    remainder = (_integer(m).astype(jnp.int32) << (odd + 23)) - root * root
    for _ in range(3):
        above, below = remainder > root + root, remainder < 0
        step = above.astype(jnp.int32) - below.astype(jnp.int32)
        remainder = remainder - step * (root + root + step)
        root = root + step
    guard, rest = remainder > root, remainder != 0
    q = (root.astype(jnp.uint32) << 2) | (guard.astype(jnp.uint32) << 1) | rest.astype(jnp.uint32)
    return _rounded(q, (e - odd) >> 1)


def largest(bits: Array, axis: int | tuple[int, ...]) -> Array:
    """max |x| over `axis` from magnitude bits: IEEE order is integer order, and NaN stands above infinity."""
    return jnp.max(bits, axis=axis, initial=np.uint32(0))


@elementwise
def is_finite(magnitude: Array) -> Array:
    """True where the magnitude is neither infinite nor NaN."""
    return magnitude < INFINITY


@elementwise
def rounded_to_bfloat16(bits: Array) -> Array:
    """fp32 bits of the nearest bf16 value (ties to even, subnormals kept); not for NaN."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)


@elementwise
def add(a: Array, b: Array) -> Array:
    """The bits of fl(a + b), signs and subnormals included.

    Where both magnitudes are below 1, the sum is formed 2^64 times larger, where nothing is subnormal; where one
    is not, a subnormal other lies below half a unit in the last place, so a device that flushes it sums right.
    """
    small = ((a & MAGNITUDE) < ONE) & ((b & MAGNITUDE) < ONE)
    total = as_float(where(small, _raised(a), a)) + as_float(where(small, _raised(b), b))
    bits = as_bits(total)
    return where(small, _lowered(bits), bits)


_LIFT = np.uint32(64 << 23)


@elementwise
def _raised(bits: Array) -> Array:
    magnitude = bits & MAGNITUDE
    counted = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-85)
    raised = where(magnitude < SMALLEST_NORMAL, as_bits(counted), magnitude + _LIFT)
    return (bits & SIGN) | raised


@elementwise
def _lowered(bits: Array) -> Array:
    magnitude = bits & MAGNITUDE
    counted = (as_float(magnitude) * np.float32(2.0**85)).astype(jnp.int32).astype(jnp.uint32)
    lowered = where(magnitude < SMALLEST_NORMAL + _LIFT, counted, magnitude - _LIFT)
    return (bits & SIGN) | lowered
