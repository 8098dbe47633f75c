"""NVFP4's 16-point Hadamard transform along rows, on fp32 bits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arithmetic.elements import elementwise, maximum, where

_FLIPPED = np.array([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1], np.uint32) << np.uint32(31)
"""Sign bits of + + + - + - - - - - - + - + - -."""


def transform(panels: Array) -> Array:
    """fp32 bits [P, 16, K] of values that bf16 holds; each run of 16 rows transformed, rounded to bf16 once.

    fp32 butterflies of stride 1, 2, 4, 8, then times 0.25. Overflow, of the butterflies or of the last rounding,
    comes back as infinity or NaN.
    """
    p, n, k = panels.shape
    rounded = fp32.rounded_to_bfloat16(panels & fp32.MAGNITUDE) | (panels & fp32.SIGN)
    poisoned = (panels & fp32.MAGNITUDE) >= fp32.INFINITY
    value = jnp.where(poisoned, fp32.NAN, rounded) ^ jnp.asarray(_FLIPPED)[None, :, None]
    for stride in (1, 2, 4, 8):
        pairs = value.reshape(p, n // (2 * stride), 2, stride, k)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        # Without the barrier XLA computes a stage again for each of the two results that read it.
        sums = barrier(fp32.add(a, b), fp32.add(a, b ^ fp32.SIGN))
        value = jnp.stack(sums, axis=2).reshape(p, n, k)
    return _quartered(value)


@elementwise
def _quartered(bits: Array) -> Array:
    """fp32 bits of value / 4 rounded to bf16.

    Every value here is a multiple of 2^-133, so the quarter is exact in fp32 and there is one rounding.
    """
    magnitude = bits & fp32.MAGNITUDE
    exponent = magnitude >> 23
    normal = fp32.rounded_to_bfloat16(magnitude - np.uint32(2 << 23))
    # Quarter below 2^-126: significand * 2^(max(exponent, 1) - 1) units of 2^-149, a quarter of them kept.
    units = where(exponent == 0, magnitude, ((magnitude & fp32.FRACTION) | fp32.SMALLEST_NORMAL))
    units = units << (maximum(exponent, 1) - 1 & 3)
    tiny = fp32.rounded_to_bfloat16(units >> 2)
    quarter = where(exponent <= 2, tiny, normal)
    return (bits & fp32.SIGN) | where(magnitude >= fp32.INFINITY, magnitude, quarter)
