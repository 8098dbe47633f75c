"""Values as unevaluated sums of two floats, for arguments whose rounding alone would cost many ulp of the result.

XLA contracts a product and a sum into one fused operation, and takes (a + constant) - constant for a. So every high
part has its last bit cleared: an integer operation stands between it and what follows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic import bits as fp32

_UPPER_HALF = np.uint32(0xFFFFF000)
_ALL_BUT_LAST = np.uint32(0xFFFFFFFE)
_LN2, _LN2_REST = np.float32(0.693145752), np.float32(1.42860677e-06)
"""ln(2) in two floats, the first of 15 bits: a product with an integer below 512 is exact."""

_LEAST, _FARTHEST = np.int32(-60), np.int32(-126)


class Double(NamedTuple):
    """high + low, with |low| at most two ulp of high."""

    high: Array
    low: Array


class Scaled(NamedTuple):
    """value * scale, scale being a power of two up to 1: so the value is normal where the product is not."""

    value: Array
    scale: Array


def _opaque(x: Array) -> Array:
    return fp32.as_float(fp32.as_bits(x) & _ALL_BUT_LAST)


def two_sum(a: Array, b: Array) -> Double:
    """a + b."""
    total = _opaque(a + b)
    back = total - a
    return Double(total, (a - (total - back)) + (b - back))


def _halves(x: Array) -> tuple[Array, Array]:
    upper = fp32.as_float(fp32.as_bits(x) & _UPPER_HALF)
    return upper, x - upper


def two_product(a: Array, b: Array) -> Double:
    """a * b, where neither over- nor underflows."""
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    product = _opaque(a * b)
    return Double(product, ((ah * bh - product) + ah * bl + al * bh) + al * bl)


def _two_to(exponent: Array) -> Array:
    return fp32.as_float(((exponent + 127) << 23).astype(jnp.uint32))


def decay(high: Array, low: Array | float = 0.0) -> Scaled:
    """exp(-(high + low)) for 0 <= high <= 200 and a small low, within one ulp; 0 where it is below 2^-186."""
    count = jnp.floor(high * np.float32(1 / np.log(2)) + np.float32(0.5))
    r = ((count * _LN2 - high) + count * _LN2_REST) - low
    series = jnp.full_like(r, np.float32(1 / 5040))
    for term in (720, 120, 24, 6, 2):
        series = series * r + np.float32(1 / term)
    exponent = -count.astype(jnp.int32)
    near = jnp.maximum(exponent, _LEAST)
    far = jnp.maximum(exponent - near, _FARTHEST)
    return Scaled((1 + (r + r * r * series)) * _two_to(near), _two_to(far))
